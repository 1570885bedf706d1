"""What a rank's model needs of the others, without others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.config.checkpoint import load_spec
from common.errors import ConfigError
from common.model import moe
from common.model.text import TextModel
from common.parallel.collectives import SOLO
from common.parallel.exchange import AllToAll
from common.parallel.mesh import Mesh
from common.parallel.placement import Placement, even, routes
from common.parallel.team import Team
from common.weights import load_text
from tests.support.golden import write_tiny
from tests.support.models import alone, load


class Noted(AllToAll):
    """An exchange that notes when rows leave and when they are waited for."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(SOLO)
        self.events = events

    def dispatch(self, rows, ids, keep, table):
        self.events.append("rows leave")
        arrived = super().dispatch(rows, ids, keep, table)

        def wait():
            self.events.append("rows are waited for")
            return arrived()

        return wait


def test_the_shared_expert_computes_while_rows_travel(tmp_path, monkeypatch) -> None:
    directory = write_tiny(tmp_path, "k3")
    spec = load_spec(directory)
    text, count = spec.text, spec.text.moe.num_experts
    events: list[str] = []
    dense = moe._dense
    monkeypatch.setattr(moe, "_dense", lambda *a: (events.append("shared"), dense(*a))[1])
    tables = tuple(routes(even(count, 1), count, "cpu") for _ in text.moe_layers)
    team = Team(
        mesh=Mesh(),
        seat=Mesh().seat(0),
        tensor=SOLO,
        exchange=Noted(events),
        tables=tables,
        load=torch.zeros(len(tables), count, dtype=torch.int64),
    )
    model = TextModel(text, load_text(directory, spec, dtype=torch.float32), team=team)
    events.clear()
    one = load(directory)
    found = alone(replace(one, model=model), list(range(5)), [7])
    dense_layers = text.num_layers - len(text.moe_layers)
    layer = ["rows leave", "shared", "rows are waited for"]
    assert events == (["shared"] * dense_layers + layer * len(text.moe_layers)) * 2
    assert torch.equal(found, alone(one, list(range(5)), [7]))


def test_new_routes_are_taken_in_place() -> None:
    table = routes(even(4, 2), 4, "cpu", most=2)
    kept = table.share.data_ptr()
    new = Placement(((0, 1, 3), (2, 3, 1)))
    table.take(routes(new, 4, "cpu", most=2))
    assert table.share.data_ptr() == kept
    ids = torch.tensor([[3], [3], [0]])
    share, local = table.find(ids, torch.tensor([[0], [1], [1]]))
    assert share.flatten().tolist() == [0, 1, 0] and local.flatten().tolist() == [2, 1, 0]


@pytest.mark.parametrize(
    "axes", [{}, {"tensor": 2}, {"tensor": 2, "data": 2, "expert": 2}, {"data": 2, "expert": 2}]
)
def test_rows_are_spread_only_where_every_rank_holds_whole_experts(axes) -> None:
    with pytest.raises(ConfigError, match="so that every rank holds whole experts"):
        Mesh(**axes, spread=True)
