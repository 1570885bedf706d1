"""The ranks of a replica as actors of Ray, in the replica's placement group.

The leader is Serve's actor; the others belong to it and end with it.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from common.runtime.rank import serve as serve_rank


class Ranks:
    """Actors for the ranks of one replica; their handles keep them alive."""

    def __init__(self, tables: dict[str, Any], room: str, secret: str) -> None:
        """Remember what to start them with."""
        self._tables, self._room, self._secret = tables, room, secret
        self._actors: list[tuple[Any, Any]] = []

    def start(self, rank: int, host: str, port: int) -> None:
        """Start one in its bundle of the replica's placement group."""
        group = ray.util.get_current_placement_group()
        assert group is not None, "a replica of several ranks is deployed with a bundle for each"
        bundle = group.bundle_specs[rank]
        actor: Any = (
            ray.remote(_Rank)
            .options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=rank
                ),
            )
            .remote()
        )
        leader = f"{host}:{port}"
        lives = actor.serve.remote(self._tables, self._room, rank, leader, self._secret)
        self._actors.append((actor, lives))

    def ended(self) -> list[int]:
        """See `Starter`."""
        over, _ = ray.wait(
            [lives for _, lives in self._actors], num_returns=len(self._actors), timeout=0
        )
        return [rank for rank, (_, lives) in enumerate(self._actors, 1) if lives in over]


class _Rank:
    """A process that becomes a rank; the call ends with the process."""

    def serve(self, tables: dict[str, Any], room: str, rank: int, leader: str, secret: str) -> None:
        serve_rank(tables, room, rank, leader, secret)
