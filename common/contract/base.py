"""The base of all messages: tagged, frozen, and strict about unknown fields."""

from __future__ import annotations

import msgspec


class Message(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag=True,
    omit_defaults=True,
):
    """Base of all messages."""
