"""Taking in a hand-off on several ranks.

A ticket names one slot; each rank READs its own heads of it and its own copy of the latents, from
whichever ranks have them, and the request is admitted when the digests add up to what was signed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.contract.messages import DecodeJob
from common.errors import ServingError
from common.runtime.leading import Leading
from common.runtime.orders import Measure
from common.runtime.rank import measure
from common.transfer.link import Source
from common.transfer.slices import whole
from services.decode.held import Held
from services.decode.intake import Intake


class GroupIntake(Intake):
    """The receiving half of a decode room of several ranks."""

    def __init__(self, leading: Leading, *own: Any, **more: Any) -> None:
        """Arguments after `leading` as of `Intake`; the memory is the leader's."""
        super().__init__(*own, **more)
        self._leading, self.readers = leading, leading.mesh.tensor

    def _read(
        self,
        held: Held,
        reads: list[list[Source]],
        deadline_s: float,
        read_ended: Callable[[], None],
    ) -> None:
        """See `Intake`."""

        def is_over() -> bool:
            return held.stage != "fetching"

        ranks = dict(zip(self._leading.ranks(held.memory.lane), reads, strict=True))
        own = ranks.pop(0, None)
        others = self._leading.pull(ranks, deadline_s, read_ended)
        try:
            if own is not None:
                self._receiver.fetch_all(own, deadline_s, is_over, read_ended)
        except ServingError:
            self._leading.abandon(set(others))
            raise
        self._leading.await_all(others, deadline_s, is_over)

    def _verify(self, held: Held, job: DecodeJob) -> None:
        """See `Intake`: the ranks' digests add up to what was signed."""

        def order(number: int) -> Measure:
            return Measure(
                number=number,
                slot=held.slots[0],
                canary_slot=held.canary_slot,
                pages=held.prompt_pages,
                tokens=held.reserve.prompt_tokens,
            )

        asked = self._leading.measure(held.memory.lane, order)
        own = [] if held.memory.lane else [measure(self._memory, order(0))]
        others = self._leading.await_all(asked, self._deadline_s, lambda: held.stage != "fetching")
        self._receiver.verify(job.ticket.seal.digests, lambda: whole([*own, *others]))
