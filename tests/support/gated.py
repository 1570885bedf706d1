"""Two memories on a fabric, and a link whose READs end only as far as a test lets them."""

from __future__ import annotations

import torch

from common.contract.messages import Endpoint, Offer
from common.runtime.landing import Landing
from common.runtime.memory import TextMemory
from common.runtime.place import Place
from common.transfer.link import Pair, pair_spans
from common.transfer.local import Fabric, LocalLink
from common.transfer.receiver import Receiver
from tests.support.wire import DTYPE, SPEC, endpoint

THEIRS = Place(slot=2, pages=(5, 6, 9, 1), tokens=200, canary_slot=0)
OURS = Place(slot=1, pages=(3, 4, 0, 7), tokens=200, canary_slot=3)


class GatedLink(LocalLink):
    """READs are numbered as they are posted; those below `gate` may end."""

    def __init__(self, agent: str, fabric: Fabric) -> None:
        super().__init__(agent, fabric)
        self.gate, self.posted = 1000, 0

    def read(self, peer, pairs):
        number, self.posted = self.posted, self.posted + 1
        return _Gated(self, number, super().read(peer, pairs))


class _Gated:
    def __init__(self, link: GatedLink, number: int, read) -> None:
        self._link, self._number, self._read = link, number, read
        self.release = read.release

    def poll(self) -> bool:
        return self._number < self._link.gate and self._read.poll()


class Pieced:
    """A request of one memory, wanted in another, in pieces of so many bytes."""

    def __init__(self, piece_bytes: int, offer: Offer | None = None) -> None:
        self.fabric = Fabric()
        self.source, self.peer = self._room("source", LocalLink("source", self.fabric))
        self.link = GatedLink("target", self.fabric)
        self.target, _ = self._room("target", self.link)
        generator = torch.Generator().manual_seed(3)
        for memory in (self.source, self.target):
            for tensor in (memory.states.state, memory.states.conv, memory.latents.pages):
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
        self.signed = self.source.measure(THEIRS).sums
        self.landing = Landing(self.target, OURS, piece_bytes=piece_bytes, offer=offer)
        self.pieces = self.landing.pieces([(self.peer, self.pairs())])
        self.receiver = Receiver(self.link, quarantine_bound=1)
        self.seen, self.freed = list[int](), list[bool]()
        self.landed, self.posted = self._landed, self.landing.prepare

    def _room(self, name: str, link: LocalLink) -> tuple[TextMemory, Endpoint]:
        memory = TextMemory(SPEC, slots=4, pages=10, dtype=DTYPE, device="cpu")
        return memory, endpoint(link, name, memory.register(link))

    def pairs(self) -> list[Pair]:
        """Every kind of the one place with the same of the other."""
        both = zip(self.target.stretches(OURS), self.source.stretches(THEIRS), strict=True)
        spans = [(a.spans(0, a.count), b.spans(0, b.count)) for a, b in both]
        return [pair for ours, theirs in spans for pair in pair_spans(ours, theirs)]

    def _landed(self, number: int) -> None:
        self.seen.append(number)
        self.landing.landed(number)

    def fetch(self, *, deadline_s: float = 5.0, cancelled=lambda: False, gate=None) -> None:
        self.receiver.fetch_all(
            self.pieces,
            deadline_s,
            cancelled,
            lambda: self.freed.append(True),
            lambda number: self.landed(number),
            lambda: self.posted(),
            gate,
        )

    def verify(self) -> None:
        self.receiver.verify(self.signed, self.landing.signature)

    def bytes_of(self, number: int, *, local: bool) -> list[torch.Tensor]:
        """What piece `number` covers, as bytes, on either side."""
        agent = "target" if local else "source"
        pairs = [pair for _, some in self.pieces[number] for pair in some]
        spans = [pair[0 if local else 1] for pair in pairs]
        return [self.fabric.memory[agent, s.pool][s.offset : s.offset + s.size] for s in spans]
