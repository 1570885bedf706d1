"""The encoder room under Ray Serve."""

from __future__ import annotations

from typing import Any

import ray
from ray import serve

from common.config.loading import parse_settings
from common.observe.logs import start_logging
from common.runtime.replica import RoomReplica
from services.encoder.room import EncoderRoom


class Encoder(RoomReplica):
    """One replica; its id is Serve's."""

    def __init__(self, tables: dict[str, Any], secret: str) -> None:
        """`tables` are the settings as plain dictionaries."""
        settings = parse_settings(tables, source="the application's settings")
        replica = serve.get_replica_context().replica_tag
        start_logging("encoder", replica)
        super().__init__(
            lambda: EncoderRoom(settings, secret=secret, replica=replica),
            settings.server.room_host or str(ray.util.get_node_ip_address()),  # type: ignore[no-untyped-call]
            settings.server.drain_s,
            settings.scaling.window_s,
        )
