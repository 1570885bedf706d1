"""One rank's memory: what its weights, slots and pages take, and whether they fit.

Arithmetic over a ModelSpec and three numbers of ranks (tensor, data, expert); the axes' meaning is
`common.parallel.mesh`'s. All sizes are bytes. Cut widths are taken as even: padding, where a width
does not divide, is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from common.config.geometry import (
    expert_bytes,
    item_bytes,
    page_bytes,
    slot_bytes,
    text_values,
    weights,
)
from common.config.spec import ModelSpec, TextSpec
from common.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What one rank holds; `available` is 0 where the device does not tell."""

    text: int  # weights other than routed experts
    experts: int
    slots: int
    pages: int
    reserve: int  # activations, graphs, the libraries' own
    available: int

    @property
    def total(self) -> int:
        """Everything together."""
        return self.text + self.experts + self.slots + self.pages + self.reserve

    def lines(self) -> Iterator[str]:
        """The plan as text."""
        for name in ("text", "experts", "slots", "pages", "reserve"):
            yield f"{name:10} {getattr(self, name) / GIB:10.3f} GiB"
        yield f"{'total':10} {self.total / GIB:10.3f} GiB of {self.available / GIB:.3f}"

    def check(self) -> None:
        """Refuse a plan that does not fit.

        Raises:
            ConfigError: with the numbers, and what would help.
        """
        if self.available and self.total > self.available:
            raise ConfigError(
                f"a rank needs {self.total / GIB:.2f} GiB (weights "
                f"{(self.text + self.experts) / GIB:.2f}, slots {self.slots / GIB:.2f}, pages "
                f"{self.pages / GIB:.2f}, reserve {self.reserve / GIB:.2f}) and its device has "
                f"{self.available / GIB:.2f}; give more tensor or expert ranks, or fewer slots or "
                "pages"
            )


def rank_memory(
    spec: ModelSpec,
    dtype: str,
    *,
    tensor: int = 1,
    expert: int = 1,
    data: int = 1,
    spread: bool = False,
    spare: int = 0,
    landing: bool = False,
    slots: int = 0,
    pages: int = 0,
    reserve: int = 0,
    available: int = 0,
) -> RankMemory:
    """What the fullest rank of a replica holds.

    Args:
        spec: the checkpoint.
        dtype: of weights and latents.
        tensor: ranks that cut heads, vocabulary and widths.
        expert: shares of the experts.
        data: lanes.
        spread: whether each tensor rank has the shared expert whole.
        spare: places for copies of experts.
        landing: whether memory for one more layer's experts is kept, where moved ones arrive.
        slots: of one lane.
        pages: of one lane.
        reserve: bytes for everything else.
        available: the device's bytes; 0 for unknown.

    Raises:
        ConfigError: heads do not divide over the tensor ranks.
    """
    text = spec.text
    return RankMemory(
        text=text_bytes(spec, dtype, tensor=tensor, spread=spread),
        experts=share_bytes(
            spec, dtype, tensor=tensor, data=data, expert=expert, spare=spare, landing=landing
        ),
        slots=slots * slot_bytes(text, dtype, tensor=tensor),
        pages=pages * page_bytes(text, dtype),
        reserve=reserve,
        available=available,
    )


def text_bytes(spec: ModelSpec, dtype: str, *, tensor: int, spread: bool = False) -> int:
    """Weights other than routed experts on one of `tensor` ranks."""
    narrow, wide = text_values(spec.text)
    cut, cut_wide = cut_values(spec.text)
    cut -= shared_values(spec.text) if spread else 0
    size = item_bytes(dtype)
    whole = (narrow - cut) * size + (wide - cut_wide) * 4
    return whole + -(-cut * size // tensor) + -(-cut_wide * 4 // tensor)


def share_bytes(
    spec: ModelSpec,
    dtype: str,
    *,
    tensor: int,
    data: int,
    expert: int,
    spare: int = 0,
    landing: bool = False,
) -> int:
    """Routed experts of the fullest rank: a share of them, its widths cut by those who share it."""
    text = spec.text
    widths = tensor // max(1, expert // data)
    own = (-(-text.moe.num_experts // expert) + spare) * (len(text.moe_layers) + landing)
    return -(-own * expert_bytes(spec, dtype) // widths)


def cut_values(text: TextSpec) -> tuple[int, int]:
    """Values outside the experts that tensor ranks cut: of the model's dtype, and of fp32."""
    h, kda, mla = text.hidden, text.kda, text.mla
    a_kda = 4 * h * kda.inner + kda.head_dim * kda.inner + h * kda.num_heads
    a_kda += h * kda.inner if kda.full_rank_gate else kda.head_dim * kda.inner
    queries = mla.num_heads * (mla.nope_dim + mla.rope_dim)
    a_mla = (mla.q_lora_rank or h) * queries
    a_mla += mla.kv_lora_rank * mla.num_heads * (mla.nope_dim + mla.v_dim)
    a_mla += mla.num_heads * mla.v_dim * h * (2 if mla.output_gate else 1)
    dense = 3 * h * text.dense_width * (text.num_layers - len(text.moe_layers))
    shared = shared_values(text)
    layers = len(text.kda_layers) * a_kda + len(text.mla_layers) * a_mla
    wide = len(text.kda_layers) * (3 * kda.inner * kda.conv_taps + kda.inner + kda.num_heads)
    return 2 * text.vocab * h + layers + dense + shared, wide


def shared_values(text: TextSpec) -> int:
    """Values of all layers' shared experts."""
    moe = text.moe
    return 3 * text.hidden * moe.width * moe.num_shared * len(text.moe_layers)


def stored_text(spec: ModelSpec, dtype: str) -> int:
    """All weights that a single rank would hold, in bytes."""
    sizes = weights(spec, dtype)
    return sizes.text + sizes.experts
