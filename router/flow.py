"""START READING HERE: the journey of one request through the rooms.

    reserve ──▶ encode ──▶ prefill ──▶ first tokens out ──▶ hand off ──▶ frames ──▶ end
    decode      encoder    prefill     to the client        decode       decode
                           └─ an early offer ─▶ decode pulls it meanwhile (router/pulling.py)

The only file that knows this order. It works on token ids; what they mean, and how they reach the
client, is the business of `router/routes.py` and `router/prompt`. Tensors never come here: a ticket
says where they lie, and the next room pulls them.

Every journey ends with a finish reason for each choice or with an error, and whatever a room may
still hold for it is cancelled there, whichever way it ended.
"""

from __future__ import annotations

import asyncio
from functools import partial

from common.contract.messages import (
    Accepted,
    CacheTicket,
    EmbedTicket,
    ImagesMissing,
    Reservation,
)
from common.errors import (
    CapacityError,
    RoomLost,
    TransferError,
)
from router import jobs
from router.account import Account
from router.answer import Answer
from router.house import House
from router.jobs import Task
from router.ledger import Ledger, expect
from router.placement import Candidate, choose_encoder, choose_prefill, order_decodes
from router.pulling import Pulling
from router.recovery import Recovery, is_canary, spends_seat
from router.replica import Replica

PROBE_WAIT_S, PROBE_POLL_S = 5.0, 0.1
ASKS_FOR_BYTES = 3  # an encoder may forget an image between two messages, but not for ever


class Flow:
    """One task on its way; `travel` is the whole of it. Deadline and end: `router/journey.py`."""

    def __init__(
        self, task: Task, house: House, answer: Answer, ledger: Ledger, account: Account
    ) -> None:
        """Nothing is asked of any room yet."""
        self.task, self.house = task, house
        self.answer, self.account = answer, account
        self._ledger = ledger
        self._recovery = Recovery(house.settings.router, house.tally, is_probe=task.probe)
        self._name = self._seat_name = task.request  # what the rooms, and decode, know it by
        self._seat: tuple[Replica, Reservation] | None = None  # where it will decode
        self._is_accepted = False

    async def travel(self) -> None:
        """Pass after pass, until one arrives or recovery says that it is enough."""
        ledger, recovery = self._ledger, self._recovery
        while True:
            try:
                return await self._pass()
            except TransferError as refused:
                self._bench(refused)
                recovery.after_refusal(refused, ledger.at, ledger.route)
                self.account.stumbled("reprefill", ledger.at, refused)
                if spends_seat(refused, ledger.at):
                    self._leave_seat()
            except RoomLost as lost:
                dead = recovery.after_death(
                    lost, ledger.at, ledger.route, accepted=self._is_accepted
                )
                self.account.stumbled("replay", ledger.route.get(dead), lost)
                if dead == "decode":  # the reservation went with it
                    self._leave_seat()
            ledger.is_exact = False
            self._name = f"{self.task.request}~{recovery.stumbles}"

    async def _pass(self) -> None:
        """One way through the rooms; a second one begins at the reservation that still stands."""
        self._is_accepted = False
        self.answer.begin()
        part = partial(self.account.part, route=self._ledger.route)
        with part("wait"):
            decode, reservation = self._seat or await self._reserve()
        embeds = None
        if self.task.images:
            with part("encode"):
                embeds = await self._encode()
        with part("prefill"):
            ticket, prefill = await self._prefill(embeds, (decode, reservation))
        forced = self.answer.greet(ticket.seal.first)
        if self.answer.is_complete:  # the first tokens were the last ones
            await self._ledger.release(prefill, self._name, ticket.offer.nonce)
            await self._ledger.release(decode, self._seat_name, reservation.id)
            return
        with part("hand_off"):
            await self._hand_off((ticket, prefill), (decode, reservation), forced)
        with part("decode"):
            await self.answer.until_over()
        self._ledger.settle(decode, self._seat_name)

    def _leave_seat(self) -> None:
        self._seat = None
        self._ledger.free()

    async def _reserve(self) -> tuple[Replica, Reservation]:
        """Wait in the queue until a decode replica has room for the whole request."""
        self._seat_name = self._name
        if self.task.probe:
            seat = await self._wait_beside_the_queue()
            if seat is None:
                raise CapacityError("the decode replica has no room for a probe")
        else:
            seat = await self.house.admission.enter(
                self._try_reserve,
                priority=self.task.priority,
                has_begun=self.task.has_begun,
                urgent=self._recovery.stumbles > 0,
            )
        self.answer.admitted.set()
        self.account.admitted()
        self._seat = seat
        self._ledger.hold(seat[0], seat[1].id)
        return seat

    async def _wait_beside_the_queue(self) -> tuple[Replica, Reservation] | None:
        """A probe's turn: a new pair must be able to prove itself while its decode is full."""
        until = asyncio.get_running_loop().time() + PROBE_WAIT_S
        while (seat := await self._try_reserve()) is None:
            if asyncio.get_running_loop().time() >= until:
                return None
            await self.house.bell.wait(PROBE_POLL_S)
        return seat

    async def _try_reserve(self) -> tuple[Replica, Reservation] | None:
        decodes, by_id = self.house.seen("decode")
        prefills, _ = self.house.seen("prefill")
        job = jobs.reserve(self.task, self._seat_name)
        for key in order_decodes(decodes, prefills, self._usable, avoid=self._recovery.avoid):
            replica = by_id[key]
            try:
                reply = await self._ledger.ask(replica, self._seat_name, job)
            except CapacityError:
                self._ledger.settle(replica, self._seat_name)
            except RoomLost:
                continue  # it may come back with the reservation: cancelled at the end
            else:
                replica.granted_since_load += self.task.sampling.n
                return replica, expect(reply, Reservation)
        return None

    async def _encode(self) -> tuple[EmbedTicket, Replica]:
        """Bytes travel once: the first job carries only the digests of the images."""
        digests, avoid = [ref.digest for ref, _ in self.task.images], self._recovery.avoid
        encoder = await self.house.choose("encoder", lambda c: choose_encoder(digests, c, avoid))
        wanted: set[int] = set()
        for _ in range(ASKS_FOR_BYTES):
            job = jobs.encode(self.task, self._name, wanted, self._ledger.left_s())
            with jobs.naming_images(self.task):
                reply = await self._ledger.ask(encoder, self._name, job)
            if isinstance(reply, EmbedTicket):
                self._ledger.hold(encoder, reply.nonce)
                self.account.encoded(reply, encoder.id)
                return reply, encoder
            wanted |= set(expect(reply, ImagesMissing).indices)
        raise TransferError(f"{encoder.id} asked {ASKS_FOR_BYTES} times for images it was sent")

    async def _prefill(
        self, embeds: tuple[EmbedTicket, Replica] | None, seat: tuple[Replica, Reservation]
    ) -> tuple[CacheTicket, Replica]:
        """Prefill pulls the embeddings, computes the prompt and samples the first tokens."""
        beside, avoid = seat[0].candidate(), self._recovery.avoid
        prefill = await self.house.choose(
            "prefill", lambda c: choose_prefill(c, beside, self._usable, avoid=avoid)
        )
        images = (embeds[0], embeds[1].endpoint) if embeds else None
        job = jobs.prefill(self.task, self._name, images, self._ledger.left_s())
        theirs, ours = (prefill, self._name), (*seat, self._seat_name)
        pulling = Pulling(self.task, self.house, self._ledger, theirs, ours)
        with prefill.carrying(len(self.task.token_ids)):
            async with pulling:
                ticket = expect(await self._ledger.ask(prefill, self._name, job), CacheTicket)
        if embeds:
            self._ledger.settle(embeds[1], self._name)
        self._ledger.hold(prefill, ticket.offer.nonce)
        self.account.prefilled(ticket.seal, prefill.id)
        return ticket, prefill

    async def _hand_off(
        self,
        ticket: tuple[CacheTicket, Replica],
        seat: tuple[Replica, Reservation],
        forced: list[list[int]],
    ) -> None:
        """Decode pulls, verifies and accepts; from then on it owns the request's memory."""
        (sealed, prefill), (decode, reservation), name = ticket, seat, self._seat_name
        signed = (sealed, prefill.endpoint)
        job = jobs.decode(self.task, name, reservation.id, signed, forced, self._ledger.left_s())
        decode.followers[name] = self.answer
        self.answer.pace = lambda paused: self._pace(decode, name, paused)
        accepted = expect(await self._ledger.ask(decode, name, job), Accepted)
        self.account.accepted(accepted, decode.id)
        self._is_accepted = True
        if self.answer.outbox.is_paused:  # since before a stumble: this replica cannot know
            self._pace(decode, name, True)
        self._ledger.let_lapse()
        self._ledger.settle(prefill, self._name)

    def _pace(self, decode: Replica, name: str, paused: bool) -> None:
        """The client reads too slowly, or has caught up."""
        self.house.spawn(decode.pace(name, paused))

    def _bench(self, refused: TransferError) -> None:
        """A canary says that two replicas compute differently: they serve no more together."""
        route = self._ledger.route
        if is_canary(refused):
            prefill, decode = route["prefill"].candidate(), route["decode"].candidate()
            self.house.pairs.failed(prefill, decode)
            if choose_prefill(self.house.seen("prefill")[0], decode, self._usable) is None:
                raise refused

    def _usable(self, prefill: Candidate, decode: Candidate) -> bool:
        if self.task.pair is not None:
            return self.task.pair == (prefill.id, decode.id)
        return self.house.pairs.usable(prefill, decode)
