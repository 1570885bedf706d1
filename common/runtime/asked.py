"""Asked: what a leader asked of a rank, and how its answers turn into results and errors."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from common.errors import (
    Cancelled,
    DeadlineExceeded,
    HandoffRefused,
    RoomLost,
    ServingError,
    TransferError,
)
from common.ops.digest import Signature
from common.runtime.orders import Chosen, Counted, Ended, Freed, Measured

ERRORS: dict[str, type[ServingError]] = {
    kind.code: kind for kind in (TransferError, DeadlineExceeded, Cancelled, RoomLost)
}
Answer = Ended | Freed | Measured | Counted | Chosen


@dataclass(slots=True)
class Asked:
    """One question, by number and rank in the leader's book."""

    future: Future[Any] = field(default_factory=Future)
    on_free: Callable[[], None] | None = None  # of a READ, whose destination is free again later

    def is_over(self, answer: Answer) -> bool:
        """Whether all is said; a READ has two words to say."""
        if isinstance(answer, Freed):
            return self.future.done()
        return not isinstance(answer, Ended) or self.on_free is None

    def take(self, answer: Answer) -> None:
        """Set what was waited for, or free."""
        if isinstance(answer, Freed):
            self.free()
        elif isinstance(answer, Counted):
            self.future.set_result(answer.rows)
        elif isinstance(answer, Chosen):
            self.future.set_result(answer)
        elif isinstance(answer, Ended) and answer.code:
            self.future.set_exception(_error(answer))
        else:
            self.future.set_result(Signature(sums=answer.sums, unsound=answer.unsound))

    def lose(self, reason: str) -> None:
        """The rank is gone."""
        if not self.future.done():
            self.future.set_exception(RoomLost(reason))
        self.free()

    def free(self) -> None:
        """Tell once that nobody writes into the destination."""
        if self.on_free is not None:
            on_free, self.on_free = self.on_free, None
            on_free()


def _error(order: Ended) -> ServingError:
    if order.code == HandoffRefused.code:
        return TransferError(order.text)
    return ERRORS.get(order.code, TransferError)(order.text)
