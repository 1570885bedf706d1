"""Decode pulls what prefill offers before the prompt's last chunk is computed.

An offer that comes while prefill works is passed on to decode at once; its answer matters only
where the pull came to nothing, since its ticket is then gone, and with a READ in progress its
reservation too. One that decode turns away is handed off whole. Renewals: as of any ticket.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from common.contract.messages import Offer, Reservation
from common.errors import (
    Cancelled,
    CapacityError,
    DeadlineExceeded,
    ServingError,
    TransferError,
)
from router import jobs
from router.house import House
from router.jobs import Task
from router.ledger import GRACE_S, SPARE_S, Ledger
from router.replica import Replica

ANSWER_S = 1.0  # how long prefill's failure waits for the pull's, which may have caused it


class Pulling:
    """`async with` it while prefill has the job."""

    def __init__(
        self,
        task: Task,
        house: House,
        ledger: Ledger,
        prefill: tuple[Replica, str],
        decode: tuple[Replica, Reservation, str],
    ) -> None:
        """The replicas, the reservation, and what either of them knows the request by."""
        self._task, self._house, self._ledger = task, house, ledger
        self._prefill, self._name = prefill
        self._decode, self._reservation, self._seat_name = decode
        self._pull: asyncio.Task[None] | None = None
        self._failure: ServingError | None = None

    async def __aenter__(self) -> None:
        """Listen for the offer."""
        self._prefill.offers[self._name] = self._offered

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """Listen no more; where prefill failed because the pull did, raise the pull's error."""
        self._prefill.offers.pop(self._name, None)
        if self._pull is None:
            return
        if isinstance(error, TransferError):
            await asyncio.wait({self._pull}, timeout=ANSWER_S)
        self._pull.cancel()
        if isinstance(error, TransferError) and self._failure is not None:
            self._ledger.at = self._decode
            raise self._failure from error

    def _offered(self, offer: Offer) -> None:
        if self._pull is None:
            self._ledger.hold(self._prefill, offer.nonce)
            self._pull = self._house.spawn(self._run(offer))

    async def _run(self, offer: Offer) -> None:
        left_s = max(self._ledger.left_s(), 0.0)
        offered = (offer, self._prefill.endpoint)
        job = jobs.pull(self._task, self._seat_name, self._reservation.id, offered, left_s)
        try:
            await self._decode.call(job, timeout_s=left_s + GRACE_S)
        except DeadlineExceeded as late:
            if self._ledger.left_s() > SPARE_S:  # not the request's deadline, but that of one READ
                self._failure = TransferError(str(late))
        except (CapacityError, Cancelled):
            return  # it was turned away, or given up for another reason that prefill knows
        except ServingError as error:
            self._failure = error
