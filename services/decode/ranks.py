"""Taking in a hand-off on several ranks.

A ticket names one slot; each rank READs its own heads of it and its own copy of the latents, from
whichever ranks have them, and the request is admitted when the digests add up to what was signed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.errors import ServingError
from common.ops.digest import Signature
from common.runtime.leading import Leading
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
        self.is_alone = False

    def _read(
        self,
        held: Held,
        reads: list[list[Source]],
        deadline_s: float,
        read_ended: Callable[[], None],
    ) -> Callable[[], Signature]:
        """See `Intake`: what the ranks have adds up."""

        def is_over() -> bool:
            return held.stage != "fetching"

        ranks = dict(zip(self._leading.ranks(held.memory.lane), reads, strict=True))
        own = ranks.pop(0, None)
        asked = self._leading.pull(held.prompt_place, ranks, deadline_s, read_ended)
        try:
            mine = None if own is None else super()._read(held, [own], deadline_s, read_ended)
        except ServingError:
            self._leading.abandon(set(asked))
            raise
        others = self._leading.await_all(asked, deadline_s, is_over)
        return lambda: whole([*others] if mine is None else [mine(), *others])
