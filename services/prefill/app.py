"""The prefill room under Ray Serve."""

from __future__ import annotations

from typing import Any

import ray
from ray import serve

from common.config.loading import parse_settings
from common.observe.logs import start_logging
from common.runtime.replica import RoomReplica
from services.prefill.room import PrefillRoom
from services.ranks import Ranks


class Prefill(RoomReplica):
    """One replica; its id is Serve's."""

    def __init__(self, tables: dict[str, Any], secret: str) -> None:
        """`tables` are the settings as plain dictionaries."""
        settings = parse_settings(tables, source="the application's settings")
        replica = serve.get_replica_context().replica_tag
        start_logging("prefill", replica)
        host = settings.server.room_host or str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        ranks = Ranks(tables, "prefill", secret)
        super().__init__(
            lambda: PrefillRoom(settings, secret=secret, replica=replica, starter=ranks, host=host),
            host,
            settings.server.drain_s,
            settings.scaling.window_s,
        )
