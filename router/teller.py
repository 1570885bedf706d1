"""What an answer must be able to say, whatever API it is told in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from common.contract.messages import TokenItem
from router.faults import Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Tokens of the prompt: all of them, those that came from a cache, those of images."""

    prompt: int
    cached: int = 0
    image: int = 0


class Teller(Protocol):
    """One answer in one API's shapes; events are bytes ready to be sent."""

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended."""

    def take(self, item: TokenItem) -> None:
        """Read a share of a frame, for a whole reply."""

    def whole(self, spent: Spent) -> bytes:
        """The whole reply, once complete."""

    def opening(self) -> bytes:
        """First events, before any token exists."""

    def more(self, item: TokenItem) -> bytes:
        """Events for a share of a frame; may be empty."""

    def closing(self, spent: Spent) -> bytes:
        """Last events of a complete answer."""

    def broken(self, told: Fault) -> bytes:
        """Last events of an answer that cannot be finished."""
