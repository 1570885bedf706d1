"""Which replicas there are, and where they listen: one table per process.

Serve fills it (`router/discovery.py`), or the command line does. Who sits at an address, and since
when, the replica says itself when it is dialled. The table is written from Serve's thread and read
from the router's loop: each group is replaced whole, so a reader sees the old or the new one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """An address where a replica listens; `key` is its name in whatever filled the table."""

    key: str
    host: str
    port: int


class Seats:
    """Groups of seats; a group is a deployment, or the command line's list."""

    def __init__(self) -> None:
        """Start empty."""
        self._groups: dict[str, dict[str, Seat]] = {}

    def fill(self, group: str, seats: list[Seat]) -> None:
        """Replace a group: who is not in `seats` has left, or is about to."""
        self._groups[group] = {seat.key: seat for seat in seats}

    def remove(self, group: str, key: str) -> None:
        """Take out one seat whose replica is known to be dead."""
        left = dict(self._groups.get(group, {}))
        if left.pop(key, None) is not None:
            self._groups[group] = left

    def all(self) -> dict[str, Seat]:
        """Every seat by its key."""
        return {key: seat for group in list(self._groups.values()) for key, seat in group.items()}


def seats_of(addresses: str) -> list[Seat]:
    """Parse `host:port,host:port`.

    Raises:
        ValueError: an address without a port number.
    """
    seats = []
    for address in filter(None, (part.strip() for part in addresses.split(","))):
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"`{address}` is not host:port")
        seats.append(Seat(key=address, host=host, port=int(port)))
    return seats


TABLE = Seats()  # the one Serve's request-router class fills
