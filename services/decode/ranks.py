"""The decode room of several ranks: how they are started, and how a hand-off reaches all of them.

A ticket names one slot of whole layers; each rank READs its own heads of it and its own copy of the
latents, and the request is admitted when the ranks' digests add up to what was signed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

from common.config.loading import as_tables
from common.config.settings import Settings
from common.contract.messages import DecodeJob
from common.errors import ServingError
from common.grammar.shelf import GrammarShelf
from common.parallel.mesh import Mesh
from common.runtime.identity import Identity
from common.runtime.leading import Leading
from common.runtime.orders import Measure
from common.runtime.rank import measure
from common.runtime.text_room import Claim
from common.transfer.link import Pair, pair_spans
from common.transfer.receiver import Receiver
from common.transfer.slices import pairs_by_source, slices, slot_memory, whole
from common.transfer.verify import Extent, spans_of
from services.decode.held import Held
from services.decode.intake import Intake


class GroupIntake(Intake):
    """The receiving half of a decode room of several ranks."""

    def __init__(
        self,
        leading: Leading,
        receiver: Receiver,
        identity: Identity,
        grammars: GrammarShelf,
        *,
        deadline_s: float,
        claim: Claim,
    ) -> None:
        """Arguments as of `Intake`; the memory is the leader's."""
        super().__init__(
            leading.memory, receiver, identity, grammars, deadline_s=deadline_s, claim=claim
        )
        self._leading, self._ways = leading, leading.mesh.tensor
        loaded = leading.loaded
        self._whole = slot_memory(loaded.spec.text, loaded.dtype.itemsize)
        self.readers = self._ways

    def _checked(self, held: Held, job: DecodeJob) -> list[list[Pair]]:
        """See `Intake`: every rank is a reader."""
        local = self._check(held, job, self._extents(held))
        remote = spans_of(job.ticket)
        found: list[list[Pair]] = []
        for rank in range(self._ways):
            pairs = pair_spans(local["latent"], remote["latent"])
            for kind, spans in local.items():
                if kind != "latent":
                    memory = self._whole[kind.removeprefix("canary_")]
                    table = slices(memory, sources=1, targets=self._ways, target=rank)
                    pairs += pairs_by_source(table, spans[0], remote[kind])[0]
            found.append(pairs)
        return found

    def _read(
        self,
        held: Held,
        job: DecodeJob,
        pairs: list[list[Pair]],
        deadline_s: float,
        read_ended: Callable[[], None],
    ) -> None:
        """See `Intake`."""

        def is_over() -> bool:
            return held.stage != "fetching"

        ranks = dict(zip(self._leading.ranks(held.memory.lane), pairs, strict=True))
        others = {rank: own for rank, own in ranks.items() if rank}
        reads = self._leading.pull(job.producer, others, deadline_s, read_ended)
        try:
            if 0 in ranks:
                self._receiver.fetch(job.producer, pairs[0], deadline_s, is_over, read_ended)
        except ServingError:
            self._leading.abandon(set(reads))
            raise
        self._leading.await_all(reads, deadline_s, is_over)

    def _extents(self, held: Held) -> dict[str, Extent]:
        """What a ticket must cover: slots of whole layers."""
        slots = {
            kind: Extent(unit=memory.slot_bytes(1), count=1) for kind, memory in self._whole.items()
        }
        page = self._memory.latents.page_bytes
        return slots | {"latent": Extent(unit=page, count=len(held.prompt_pages))}

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


def mesh_of(settings: Settings) -> Mesh:
    """The mesh that the settings name.

    Raises:
        ConfigError: it is none.
    """
    decode = settings.decode
    return Mesh(tensor=decode.tensor, data=decode.data, expert=decode.expert)


class LocalRanks:
    """Ranks as processes of this host; they end when their leader hangs up."""

    def __init__(self, settings: Settings, secret: str) -> None:
        """Remember what to start them with."""
        self._tables = json.dumps(as_tables(settings)).encode()
        self._secret = secret
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, rank: int, host: str, port: int) -> None:
        """Start one; it reads the settings from its standard input."""
        process = subprocess.Popen(
            [sys.executable, "-m", "services.decode.rank", str(rank), f"{host}:{port}"],
            env=os.environ | {"BATON_SECRET": self._secret},
            stdin=subprocess.PIPE,
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it ended already; `ended` will tell
            process.stdin.write(self._tables)
            process.stdin.close()
        self.processes.append(process)

    def ended(self) -> list[int]:
        """See `Starter`."""
        return [rank for rank, one in enumerate(self.processes, 1) if one.poll() is not None]

    def close(self, within_s: float = 10.0) -> None:
        """Wait until all have ended; the leader has hung up."""
        for process in self.processes:
            try:
                process.wait(within_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
