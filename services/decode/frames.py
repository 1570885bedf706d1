"""Tokens on their way out: collected during a step, one frame a router when it ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from common.contract.messages import TokenFrame, TokenItem, TokenOut
from common.errors import ServingError
from services.decode.held import Choice, Held

Push = Callable[[str, TokenFrame], None]  # (caller, frame), from the engine's thread


class Frames:
    """What the present step says, by router."""

    def __init__(self, push: Push) -> None:
        """`push(caller, frame)` sends."""
        self._push = push
        self._items: dict[str, list[TokenItem]] = defaultdict(list)

    def add(
        self,
        held: Held,
        choice: Choice,
        tokens: tuple[TokenOut, ...],
        finish: str = "",
        error: ServingError | None = None,
    ) -> None:
        """One choice's share."""
        item = TokenItem(
            request=held.reserve.request,
            choice=choice.index,
            tokens=tokens,
            finish=finish,
            error=str(error) if error else "",
            code=error.code if error else "",
        )
        self._items[held.caller].append(item)

    def flush(self, step: int) -> None:
        """Send everything collected."""
        for caller, items in self._items.items():
            self._push(caller, TokenFrame(step=step, items=tuple(items)))
        self._items.clear()
