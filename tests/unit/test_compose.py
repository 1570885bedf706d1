"""What Ray is asked for: a bundle for each rank of a replica, of either text room."""

from __future__ import annotations

import pytest

from common.config.loading import parse_settings
from services.app import _room
from services.decode.app import Decode
from services.encoder.app import Encoder
from services.prefill.app import Prefill

SETTINGS = parse_settings(
    {
        "model": {"device": "cuda"},
        "prefill": {"tensor": 2},
        "decode": {"tensor": 4, "data": 4, "expert": 16},
    },
    source="test",
)


@pytest.mark.parametrize(
    ("kind", "ranks", "strategy"), [(Prefill, 2, "STRICT_PACK"), (Decode, 16, "PACK")]
)
def test_a_group_gets_a_bundle_a_rank_on_one_node_where_one_holds_them(kind, ranks, strategy):
    asked = _room(kind, 1, SETTINGS)._replica_config
    assert asked.placement_group_bundles == [{"CPU": 0.5, "GPU": 1}] * ranks
    assert asked.placement_group_strategy == strategy


def test_a_room_of_one_rank_needs_no_group() -> None:
    assert _room(Encoder, 1, SETTINGS)._replica_config.placement_group_bundles is None
