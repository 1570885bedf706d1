"""The decode room under Ray Serve.

A replica of several ranks is a leader, which is Serve's actor, and an actor for every other rank in
the replica's placement group; they belong to the leader and end with it.
"""

from __future__ import annotations

from typing import Any

import ray
from ray import serve
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from common.config.loading import parse_settings
from common.runtime.replica import RoomReplica
from services.decode.rank import serve as serve_rank
from services.decode.room import DecodeRoom


class Decode(RoomReplica):
    """One replica; its id is Serve's."""

    def __init__(self, tables: dict[str, Any], secret: str) -> None:
        """`tables` are the settings as plain dictionaries."""
        settings = parse_settings(tables, source="the application's settings")
        replica = serve.get_replica_context().replica_tag
        host = settings.server.room_host or str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        ranks = Ranks(tables, secret)
        super().__init__(
            lambda: DecodeRoom(settings, secret=secret, replica=replica, starter=ranks, host=host),
            host,
            settings.server.drain_s,
            settings.scaling.window_s,
        )


class Ranks:
    """Actors for the ranks of one replica; their handles keep them alive."""

    def __init__(self, tables: dict[str, Any], secret: str) -> None:
        """Remember what to start them with."""
        self._tables, self._secret = tables, secret
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
        lives = actor.serve.remote(self._tables, rank, host, port, self._secret)
        self._actors.append((actor, lives))

    def ended(self) -> list[int]:
        """See `Starter`."""
        over, _ = ray.wait(
            [lives for _, lives in self._actors], num_returns=len(self._actors), timeout=0
        )
        return [rank for rank, (_, lives) in enumerate(self._actors, 1) if lives in over]


class _Rank:
    """A process that becomes a rank; the call ends with the process."""

    def serve(self, tables: dict[str, Any], rank: int, host: str, port: int, secret: str) -> None:
        serve_rank(tables, rank, host, port, secret)
