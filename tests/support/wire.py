"""A small text spec, endpoints and tickets for tests of pools and transfer."""

from __future__ import annotations

import torch

from common.cache.kda_pool import StatePool
from common.cache.layout import wire_layout
from common.cache.mla_pool import LatentPool, pages_of
from common.config.checkpoint import KdaSpec, MlaSpec, MoeSpec, TextSpec
from common.contract.messages import CacheTicket, Endpoint, Part, Seal
from common.contract.regions import PoolInfo, print_of
from common.transfer.link import Link
from common.transfer.owner import Owner
from common.transfer.verify import Extent

MODEL_PRINT = "m" * 32
TOKEN_HASH = bytes(range(16))

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
