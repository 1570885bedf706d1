"""PiecedRead: one READ that travels in pieces, so that the first can be looked at before the last.

A few pieces are in flight at a time, in order; each next one is posted when an earlier one ended,
before that one is shown to anybody, and none that a gate keeps back. It ends when no piece is in
progress and none will be posted: after the last, after a failure, or once it was given up. Until
then the whole destination is its own (`link.py`). One thread polls it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from common.errors import ServingError, TransferError
from common.transfer.gate import Gate
from common.transfer.link import Read, Source

IN_FLIGHT = 3


class PiecedRead:
    """A READ of the promises of `link.Read`."""

    def __init__(
        self,
        post: Callable[[Sequence[Source]], Read],
        pieces: Sequence[Sequence[Source]],
        landed: Callable[[int], None] | None,
        posted: Callable[[], None] | None = None,
        gate: Gate | None = None,
    ) -> None:
        """Post the first pieces.

        Args:
            post: posts one piece.
            pieces: what each READs of which peers.
            landed: called with a piece's number when its bytes are here, in order of arrival.
            posted: called by the first poll: what can be done while the first pieces travel.
            gate: says how many pieces may be posted; None: all.

        Raises:
            TransferError: the first piece was refused, so that nothing is in progress.
        """
        self._post, self._landed, self._count = post, landed, len(pieces)
        self._posted, self._gate = posted, gate
        self._waiting = deque(enumerate(pieces))
        self._open: list[tuple[int, Read]] = []
        self._failure: Exception | None = None
        self._fill()
        if self._failure is not None and not self._open:
            raise self._failure

    def poll(self) -> bool:
        """See `Read`; an error of `posted` or `landed` is the READ's and raised at its end."""
        posted, self._posted = self._posted, None
        if posted is not None:
            self._tell(posted)
        for piece in list(self._open):
            number, read = piece
            try:
                if not read.poll():
                    continue
            except TransferError as failure:
                self._fail(number, failure)
            self._open.remove(piece)
            self._fill()
            self._show(number)
            read.release()
        if self._gate is not None:
            self._fill()
        if self._open or self._waiting:
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def give_up(self) -> None:
        """Post no more pieces and show none; those in flight go on."""
        self._waiting.clear()
        self._landed = self._posted = None

    @property
    def kept_back(self) -> int | None:
        """The next piece's number where nothing is in progress and the gate keeps it back."""
        return self._waiting[0][0] if self._waiting and not self._open else None

    @property
    def is_in_progress(self) -> bool:
        """Whether a piece may still land."""
        return bool(self._open)

    def release(self) -> None:
        """See `Read`."""
        if self._open:
            raise RuntimeError("a READ in progress cannot be released")

    def _fill(self) -> None:
        while self._waiting and len(self._open) < IN_FLIGHT:
            if not self._may_post(self._waiting[0][0]):
                break
            number, piece = self._waiting.popleft()
            try:
                self._open.append((number, self._post(piece)))
            except TransferError as failure:
                self._fail(number, failure)

    def _may_post(self, number: int) -> bool:
        if self._gate is None:
            return True
        try:
            return number < self._gate.pieces()
        except ServingError as failure:  # pieces may be in progress: it waits for their end
            self._waiting.clear()
            self._failure = self._failure or failure
            return False

    def _show(self, number: int) -> None:
        if self._landed is not None and self._failure is None:
            self._tell(partial(self._landed, number))

    def _tell(self, whom: Callable[[], None]) -> None:
        try:
            whom()
        except Exception as fault:  # pieces may be in progress: it waits for their end
            self._waiting.clear()
            self._failure = fault

    def _fail(self, number: int, failure: TransferError) -> None:
        self._waiting.clear()
        if self._failure is None:
            which = f"piece {number + 1} of {self._count}: " if self._count > 1 else ""
            self._failure = TransferError(f"{which}{failure}")
            self._failure.library = failure.library
