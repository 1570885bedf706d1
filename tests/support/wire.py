"""A small text spec, endpoints and tickets for tests of pools and transfer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from common.cache.embed_arena import EmbedArena
from common.cache.kda_pool import StatePool
from common.cache.layout import wire_layout
from common.cache.mla_pool import LatentPool, pages_of
from common.config.checkpoint import KdaSpec, MlaSpec, MoeSpec, TextSpec
from common.contract.messages import CacheTicket, EmbedPart, EmbedTicket, Endpoint, Part, Seal
from common.contract.regions import PoolInfo, print_of
from common.ops.digest import Signature
from common.transfer.digest import digest_embeds
from common.transfer.link import Link
from common.transfer.local import Fabric, LocalLink
from common.transfer.owner import Owner
from common.transfer.receiver import Receiver
from common.transfer.verify import Extent, pair_parts

MODEL_PRINT = "m" * 32
TOKEN_HASH = bytes(range(16))
TOKENS = 130  # of the usual request: two full pages and two tokens

SPEC = TextSpec(
    hidden=16,
    num_layers=4,
    vocab=32,
    kda=KdaSpec(num_heads=2, head_dim=8, conv_taps=4, gate_lower_bound=-5.0, full_rank_gate=True),
    mla=MlaSpec(
        num_heads=2,
        q_lora_rank=None,
        kv_lora_rank=8,
        nope_dim=4,
        rope_dim=4,
        v_dim=4,
        output_gate=True,
    ),
    moe=MoeSpec(
        num_experts=4,
        top_k=2,
        num_shared=1,
        width=8,
        latent=None,
        latent_norm=False,
        renormalize=True,
        scaling=1.0,
        num_groups=1,
        top_groups=1,
    ),
    kda_layers=(0, 1, 2),
    mla_layers=(3,),
    moe_layers=(1, 2, 3),
    dense_width=16,
    activation="situ",
    situ_beta=4.0,
    situ_linear_beta=25.0,
    residual_block=None,
    eps=1e-5,
    max_position=1024,
    dtype="bfloat16",
)
DTYPE = torch.bfloat16
LAYOUT_PRINT = print_of(wire_layout(SPEC, DTYPE))


class Room:
    """The memory of one side: pools, their registration, and who it says it is."""

    def __init__(
        self, link: Link, id: str, *, epoch: int = 1, slots: int = 4, pages: int = 16, seed: int = 0
    ):
        self.link, self.id = link, id
        self.states = StatePool(SPEC, slots, dtype=DTYPE, device="cpu")
        self.latents = LatentPool(SPEC, pages, dtype=DTYPE, device="cpu")
        self.infos = tuple(
            link.register(name, tensor)
            for name, tensor in (
                ("state", self.states.state),
                ("conv", self.states.conv),
                ("latent", self.latents.pages),
            )
        )
        self.owner = Owner(id, epoch, MODEL_PRINT, LAYOUT_PRINT)
        self.endpoint = endpoint(link, id, self.infos, epoch=epoch)
        self.ended: list[str] = []
        self._random = torch.Generator().manual_seed(seed)

    def memory(self) -> tuple[torch.Tensor, ...]:
        """All pools."""
        return (self.states.state, self.states.conv, self.latents.pages)

    def absorb(
        self, slot: int, pages: tuple[int, ...], num_tokens: int, nonce: bytes = b"r"
    ) -> None:
        """Stand in for prefill: fill a request's memory, sign full pages, advance its header."""
        self.states.begin(slot, nonce)
        for tensor in (self.states.state[slot], self.states.conv[slot]):
            tensor.copy_(torch.randn(tensor.shape, generator=self._random))
        for position, page in enumerate(pages):
            self.latents.open([page])
            count = min(64, num_tokens - 64 * position)
            shape = self.latents.pages[page, :, :count].shape
            self.latents.pages[page, :, :count] = torch.randn(shape, generator=self._random).to(
                DTYPE
            )
        self.latents.sign(pages[: num_tokens // 64], 0)
        self.states.advance(slot, nonce, num_tokens)

    def publish(
        self, slot: int, pages: tuple[int, ...], num_tokens: int, request: str = "r"
    ) -> CacheTicket:
        """Offer and seal what `absorb` made."""
        spans = self.states.span(slot)
        parts = [Part(kind=kind, span=span) for kind, span in spans.items()]
        parts += [Part(kind="latent", span=span) for span in self.latents.spans(pages)]
        offer = self.owner.offer(request, parts, self.ended.append)
        signed = self.states.sign(slot) | self.latents.signed(pages, num_tokens)
        seal = Seal(num_tokens=num_tokens, token_hash=TOKEN_HASH, digests=signed.sums, first=())
        return self.owner.seal(offer.nonce, seal)

    def expected(self, num_tokens: int) -> dict[str, Extent]:
        """What a ticket for so many tokens must cover."""
        return {
            "state": Extent(unit=self.states.state_bytes, count=1),
            "conv": Extent(unit=self.states.conv_bytes, count=1),
            "latent": Extent(unit=self.latents.page_bytes, count=pages_of(num_tokens)),
        }


class HandOff:
    """One request prefilled in one room and wanted by another."""

    def __init__(self, *, verifying: bool = True):
        self.fabric = Fabric()
        self.source = Room(LocalLink("source", self.fabric), "p0", seed=1)
        self.target = Room(LocalLink("target", self.fabric), "d0", seed=2)
        self.tamper: Callable[[], None] = lambda: None
        self.receiver = Receiver(
            self.target.link,
            quarantine_bound=2,
            tamper=lambda _stage: self.tamper(),
            verifying=verifying,
        )
        self._left_s: float | None = None
        self.source.absorb(2, (5, 6, 9), TOKENS)
        self.ticket = self.source.publish(2, (5, 6, 9), TOKENS)
        self.slot, self.pages, self.freed = 1, (3, 4, 0), []

    def check(self, **changed):
        expected = {
            "model_print": MODEL_PRINT,
            "layout_print": LAYOUT_PRINT,
            "num_tokens": TOKENS,
            "token_hash": TOKEN_HASH,
            "expected": self.target.expected(TOKENS),
        }
        producer = changed.pop("producer", self.source.endpoint)
        self.receiver.check(changed.pop("ticket", self.ticket), producer, **expected | changed)

    def pairs(self, ticket=None):
        local = {kind: [span] for kind, span in self.target.states.span(self.slot).items()}
        local["latent"] = list(self.target.latents.spans(self.pages))
        return pair_parts(ticket or self.ticket, local)

    def fetch(self, ticket=None, *, deadline_s=5.0, cancelled=lambda: False):
        self.receiver.fetch(
            self.source.endpoint,
            self.pairs(ticket),
            deadline_s,
            cancelled,
            lambda: self.freed.append(True),
        )

    def measure(self):
        return self.target.states.sign(self.slot) | self.target.latents.measure(self.pages, TOKENS)

    def verify(self):
        self.receiver.verify(self.ticket.seal.digests, self.measure)

    def shorten(self) -> dict:
        """Pretend that the owner renewed 20.1 s ago."""
        self._left_s = 9.9
        return {}

    def run(self, **changed):
        """The whole hand-off as a decode room does it: claim, check, fetch, verify, release."""
        nonce = changed.get("ticket", self.ticket).offer.nonce
        left_s = 0.0 if self.source.owner.renew([nonce]) else self._left_s or 30.0
        outcome = "refused"
        try:
            self.check(lease_left_s=left_s, **changed)
            self.fetch(changed.get("ticket", self.ticket))
            self.verify()
            outcome = "released"
        finally:
            self.source.owner.release(nonce, outcome)


class EmbedHandOff:
    """The same between an encoder and a prefill room: two images of 5 and 3 rows."""

    IMAGES = ((b"first", 5), (b"second", 3))

    def __init__(self):
        fabric = Fabric()
        link = LocalLink("encoder", fabric)
        self.source = EmbedArena(32, SPEC.hidden, dtype=DTYPE, device="cpu")
        self.source.rows.normal_(generator=torch.Generator().manual_seed(4))
        self.endpoint = endpoint(link, "e0", (link.register("embed", self.source.rows),))
        self.owner = Owner("e0", 1, MODEL_PRINT, LAYOUT_PRINT)
        self.source.take(7)
        self.starts = [self.source.take(tokens) for _, tokens in self.IMAGES]
        parts = [
            EmbedPart(
                image=image,
                tokens=tokens,
                span=self.source.span(start),
                digest=digest_embeds(self.source.view(start))[0],
            )
            for (image, tokens), start in zip(self.IMAGES, self.starts, strict=True)
        ]
        self.ended: list[str] = []
        self.ticket = self.owner.offer_embeds("r", parts, self.ended.append)
        self.target = LocalLink("prefill", fabric)
        self.arena = EmbedArena(16, SPEC.hidden, dtype=DTYPE, device="cpu")
        self.target.register("embed", self.arena.rows)
        self.receiver = Receiver(self.target, quarantine_bound=1)

    def run(self, ticket: EmbedTicket | None = None, *, lease_left_s: float = 30.0):
        ticket = ticket or self.ticket
        self.receiver.check_embeds(
            ticket,
            self.endpoint,
            model_print=MODEL_PRINT,
            layout_print=LAYOUT_PRINT,
            images=self.IMAGES,
            row_bytes=self.arena.row_bytes,
            lease_left_s=lease_left_s,
        )
        local = [self.arena.take(part.tokens) for part in ticket.parts]
        spans = [self.arena.span(start) for start in local]
        pairs = list(zip(spans, [part.span for part in ticket.parts], strict=True))
        self.receiver.fetch(self.endpoint, pairs, 5.0, lambda: False, lambda: None)
        signed = {f"embed:{i}": part.digest for i, part in enumerate(ticket.parts)}
        self.receiver.verify(signed, lambda: self.measure(local))
        return [self.arena.view(start) for start in local]

    def measure(self, starts: list[int]) -> Signature:
        """Digests of the rows that arrived."""
        found = [digest_embeds(self.arena.view(start)) for start in starts]
        return Signature(
            sums={f"embed:{i}": value for i, (value, _) in enumerate(found)},
            unsound=tuple(f"embed:{i}" for i, (_, finite) in enumerate(found) if not finite),
        )


def endpoint(link: Link, id: str, pools: tuple[PoolInfo, ...], *, epoch: int = 1) -> Endpoint:
    return Endpoint(
        room="prefill",
        id=id,
        epoch=epoch,
        host="127.0.0.1",
        port=1,
        agent=link.agent,
        agent_metadata=link.metadata(),
        pools=pools,
        model_print=MODEL_PRINT,
        layout_print=LAYOUT_PRINT,
    )
