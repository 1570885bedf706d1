"""Stop strings over growing text: nothing of a stop string is let out, not even its first letter.

The match that ends first wins; of two that end together, the longer one. That rule does not depend
on where the text was cut.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Watches one text for the request's stop strings."""

    __slots__ = ("_held", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        """Watch for `stops`, none of them empty."""
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """What of the text so far may be let out now. Nothing more once a stop string matched."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        first: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (first is None or (start + len(stop), start) < first[:2]):
                first = (start + len(stop), start, stop)
        if first is not None:
            self.matched, self._held = first[2], ""
            return text[: first[1]]
        keep = self._begun(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Text that was held back and turned out to be no stop string."""
        text, self._held = self._held, ""
        return text

    def _begun(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
