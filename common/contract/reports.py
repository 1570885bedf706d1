"""What a room says of itself: how busy it is, and what it holds. Part of `messages.py`."""

from __future__ import annotations

import msgspec

from common.contract.base import Message


class Ping(Message, frozen=True, kw_only=True):
    """router → room, every second: a heartbeat. The reply is `Load`."""


class Load(Message, frozen=True, kw_only=True):
    """How busy a replica is.

    Ages and times in seconds; free counts are what a reservation may take.
    """

    epoch: int
    queued: int = 0
    queued_tokens: int = 0
    running: int = 0
    free_slots: int = 0
    free_pages: int = 0
    total_slots: int = 0
    total_pages: int = 0
    oldest_s: float = 0.0
    suspended: bool = False
    leaving: bool = False  # it takes no new work
    counters: dict[str, float] = msgspec.field(default_factory=dict)  # by metric and labels


class Inventory(Message, frozen=True, kw_only=True):
    """router → room: what do you hold? The reply is `Holdings`."""


class Cached(Message, frozen=True, kw_only=True):
    """What only a cache keeps: counts."""

    pages: int = 0
    slots: int = 0
    embeddings: int = 0


class Holdings(Message, frozen=True, kw_only=True):
    """What requests and leases hold: counts. Probes are left out."""

    room: str
    id: str
    epoch: int
    pages: int = 0
    slots: int = 0
    quarantine: int = 0
    embeddings: int = 0
    tickets: int = 0
    cached: Cached = Cached()
