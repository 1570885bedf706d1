"""What a rank's model needs of the others, without others."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from common.errors import ConfigError, RoomLost
from common.model import moe
from common.model.text import TextModel
from common.parallel.collectives import SOLO
from common.parallel.exchange import AllToAll
from common.parallel.mesh import Mesh
from common.parallel.placement import Placement, even, routes
from common.parallel.team import Team
from common.runtime import graphs
from common.runtime.graphs import GraphedModel
from common.runtime.grouped import GroupModel
from common.runtime.orders import order_of
from common.runtime.recorder import Eager
from tests.support.golden import write_tiny
from tests.support.models import Request, allocate, alone, chunks, load, steps


class Noted(AllToAll):
    """An exchange that notes when rows leave and when they are waited for, and how many went."""

    recordable = True

    def __init__(self, events: list[str]) -> None:
        super().__init__(SOLO)
        self.events, self.rows = events, 0

    def dispatch(self, rows, ids, keep, table):
        self.events.append("rows leave")
        self.rows += int(keep.sum())
        arrived = super().dispatch(rows, ids, keep, table)

        def wait():
            self.events.append("rows are waited for")
            return arrived()

        return wait


def team_of(loaded, events: list[str]) -> Team:
    """A team of one whose rows take the exchange's way all the same."""
    text, count = loaded.spec.text, loaded.spec.text.moe.num_experts
    tables = tuple(routes(even(count, 1), count, "cpu") for _ in text.moe_layers)
    return Team(
        mesh=Mesh(),
        seat=Mesh().seat(0),
        tensor=SOLO,
        exchange=Noted(events),
        tables=tables,
        load=torch.zeros(len(tables), count, dtype=torch.int64),
    )


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return load(write_tiny(tmp_path_factory.mktemp("tiny"), "k3"))


def test_the_shared_expert_computes_while_rows_travel(one, monkeypatch) -> None:
    events: list[str] = []
    dense, text = moe._dense, one.spec.text
    model = TextModel(text, one.weights, team=team_of(one, events))
    wanted = alone(one, list(range(5)), [7])
    monkeypatch.setattr(moe, "_dense", lambda *a: (events.append("shared"), dense(*a))[1])
    found = alone(replace(one, model=model), list(range(5)), [7])
    dense_layers = text.num_layers - len(text.moe_layers)
    layer = ["rows leave", "shared", "rows are waited for"]
    assert events == (["shared"] * dense_layers + layer * len(text.moe_layers)) * 2
    assert torch.equal(found, wanted)


def test_a_recorded_step_neither_sends_nor_counts_padding(one) -> None:
    team, layers = team_of(one, []), len(one.spec.text.moe_layers)
    model = GroupModel(one.spec.text, one.weights, team=team, data=SOLO, send=lambda order: None)
    memory, plain = (allocate(one.spec.text, slots=3, pages=3) for _ in range(2))
    model.replays = GraphedModel(model, memory, most=8, width=1, recorder=Eager())
    assert team.exchange.rows == 0 and not team.load.any()  # recording is all padding
    mine, theirs = ([Request(slot, (slot,)) for slot in range(3)] for _ in range(2))
    model.forward(chunks(*(own.share(range(5)) for own in mine)), memory)
    one.model.forward(chunks(*(other.share(range(5)) for other in theirs)), plain)
    team.exchange.rows = 0
    found = model.forward(steps(*(own.share([9]) for own in mine)), memory)
    wanted = one.model.forward(steps(*(other.share([9]) for other in theirs)), plain)
    assert torch.equal(found, wanted)
    assert team.exchange.rows == 3 * layers  # of a bucket of four
    assert team.load.sum(1).tolist() == [18 * one.spec.text.moe.top_k] * layers


def test_a_pass_begins_with_a_look_back_and_is_not_run_when_a_rank_fell_silent(one) -> None:
    events: list[str] = []
    team = team_of(one, events)

    def silent() -> None:
        raise RoomLost("ranks [1] did not answer")

    model = GroupModel(one.spec.text, one.weights, team=team, data=SOLO)
    memory, order = allocate(one.spec.text, slots=1, pages=1), order_of("steps", ((),))
    model.obey(order, memory)
    ran = len(events)
    team.exchange.check = silent
    with pytest.raises(RoomLost, match="did not answer"):
        model.obey(order, memory)
    assert ran and len(events) == ran


def test_an_idle_lane_replays_padding_alone(one) -> None:
    events: list[str] = []
    team, text = team_of(one, events), one.spec.text
    model = GroupModel(text, one.weights, team=team, data=SOLO, send=lambda order: None)
    memory = allocate(text, slots=1, pages=1)
    memory.state.fill_(1.0)
    model.replays = GraphedModel(model, memory, most=2, width=1, recorder=Eager())
    events.clear()
    (logits,) = model.obey(order_of("steps", ((),)), memory)
    assert not len(logits) and events.count("rows leave") == len(text.moe_layers)
    assert team.exchange.rows == 0 and not team.load.any() and bool((memory.state == 1).all())


@pytest.mark.parametrize(
    ("tensor", "exchange", "sentence"),
    [
        (False, True, 'set decode.exchange = "direct"'),
        (True, False, 'set decode.exchange = "direct"'),
        (True, True, ""),
    ],
)
def test_steps_of_a_group_are_captured_or_the_reason_is_told(
    one, tensor, exchange, sentence
) -> None:
    team = team_of(one, [])
    team.exchange.recordable = exchange
    told = graphs._meeting(replace(team, tensor=SimpleNamespace(recordable=tensor)))
    assert sentence in told and bool(sentence) == bool(told)
    spread = replace(team, mesh=Mesh(tensor=2, expert=2, spread=True))
    assert "set decode.spread = false" in graphs._meeting(spread)


def test_experts_that_come_one_by_one_are_judged_as_such(one, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(graphs, "uncapturable", lambda ops, stack, top: asked.append(top))
    alone = TextModel(one.spec.text, one.weights)
    assert graphs._unrecordable(alone) is None
    assert (
        graphs._unrecordable(TextModel(one.spec.text, one.weights, team=team_of(one, []))) is None
    )
    assert asked == [one.spec.text.moe.top_k, 1]


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
