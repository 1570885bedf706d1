"""How many bytes things take, and what fits: arithmetic over a ModelSpec.

Knows shapes and widths; opens no file, allocates nothing, and measures nothing (activations and the
libraries' own memory must be left out of what is handed to `fit`). All results are bytes unless
their names say otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.config.spec import CHUNK, ModelSpec, MoeSpec, TextSpec, VisionSpec
from common.errors import ConfigError

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STATE_BYTES = 4  # the recurrent state is fp32, whatever the model's dtype
PARTS = 264  # two programs a multiprocessor: parts that a step's attention is cut into
MX_GROUP = 32  # weights that share one scale byte in MXFP4
FP8_BLOCK = 128  # side of a block that shares one fp32 scale


def item_bytes(dtype: str) -> int:
    """Width of one value of a dtype's name.

    Raises:
        ConfigError: the name is not one we compute with.
    """
    if dtype not in ITEM_BYTES:
        raise ConfigError(f"dtype {dtype!r} is unknown; use one of {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[dtype]


# --- what a request holds -----------------------------------------------------------------------


def page_bytes(text: TextSpec, dtype: str, *, page_tokens: int = CHUNK) -> int:
    """One page: the latents of `page_tokens` tokens in all MLA layers."""
    return len(text.mla_layers) * page_tokens * text.mla.latent_width * item_bytes(dtype)


def state_bytes(text: TextSpec, *, tensor: int = 1) -> int:
    """One request's recurrent states of all KDA layers, on one of `tensor` ranks."""
    heads = _share(text.kda.num_heads, tensor)
    return len(text.kda_layers) * heads * text.kda.head_dim**2 * STATE_BYTES


def conv_bytes(text: TextSpec, dtype: str, *, tensor: int = 1) -> int:
    """One request's raw q, k and v rows before the current token, of all KDA layers."""
    width = _share(text.kda.num_heads, tensor) * text.kda.head_dim
    rows = text.kda.conv_taps - 1
    return len(text.kda_layers) * rows * 3 * width * item_bytes(dtype)


def slot_bytes(text: TextSpec, dtype: str, *, tensor: int = 1) -> int:
    """One slot: recurrent states and convolution rows."""
    return state_bytes(text, tensor=tensor) + conv_bytes(text, dtype, tensor=tensor)


def embed_row_bytes(text: TextSpec, dtype: str) -> int:
    """One image token as it travels from encoder to prefill."""
    return text.hidden * item_bytes(dtype)


def bank_bytes(text: TextSpec, dtype: str) -> int:
    """Earlier block outputs kept for one token while a forward pass runs; 0 without them."""
    if text.residual_block is None:
        return 0
    return -(-text.num_layers // text.residual_block) * text.hidden * item_bytes(dtype)


def step_bytes(text: TextSpec, dtype: str, rows: int, *, ranks: int = 1) -> int:
    """What a decode step of `rows` rows needs beside weights and pools: rounded up, not counted.

    `ranks` share the experts: each makes room for the rows of all.
    """
    kda, mla, moe = text.kda, text.mla, text.moe
    heads = mla.num_heads
    row = 8 * text.hidden + 2 * (4 * kda.inner + kda.head_dim + kda.num_heads) + 2 * kda.inner
    row += 4 * heads * (mla.kv_lora_rank + mla.rope_dim)
    row += 2 * ranks * moe.top_k * (moe.width + (moe.latent or text.hidden)) + 3 * text.dense_width
    parts = (PARTS + rows) * min(64, heads) * mla.kv_lora_rank * 4  # of attention, in fp32
    logits = rows * text.vocab * (4 + item_bytes(dtype))
    return rows * (row * item_bytes(dtype) + bank_bytes(text, dtype)) + parts + logits


def break_even_tokens(text: TextSpec, dtype: str) -> int:
    """Length from which on a request's pages hold at least as much as its slot."""
    per_token = page_bytes(text, dtype, page_tokens=1)
    return -(-slot_bytes(text, dtype) // per_token)


# --- what the weights hold ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Bytes of a checkpoint by what a room needs. Prefill and decode hold text and experts."""

    text: int  # everything of the text model but the routed experts
    experts: int  # all routed experts of all layers
    vision: int  # tower and projector, the encoder's alone

    @property
    def total(self) -> int:
        """The whole checkpoint."""
        return self.text + self.experts + self.vision

    def rank(self, *, expert_ranks: int = 1) -> int:
        """Bytes on one rank of a group that replicates the text part and shares the experts."""
        return self.text + -(-self.experts // expert_ranks)


def expert_bytes(spec: ModelSpec, dtype: str) -> int:
    """One routed expert of one layer as stored: three matrices and their scales."""
    moe = spec.text.moe
    width, inner = moe.latent or spec.text.hidden, moe.width
    values = 3 * width * inner
    if spec.quantization == "mxfp4":
        return values // 2 + values // MX_GROUP
    if spec.quantization == "fp8":
        return values + 3 * -(-width // FP8_BLOCK) * -(-inner // FP8_BLOCK) * 4
    return values * item_bytes(dtype)


def weights(spec: ModelSpec, dtype: str) -> Weights:
    """Bytes of all weights in `dtype`; what the release keeps in fp32 stays fp32."""
    text, size = spec.text, item_bytes(dtype)
    narrow, wide = text_values(text)
    num_experts = len(text.moe_layers) * text.moe.num_experts
    return Weights(
        text=narrow * size + wide * 4,
        experts=num_experts * expert_bytes(spec, dtype),
        vision=0 if spec.vision is None else vision_values(spec.vision) * size,
    )


def text_values(text: TextSpec) -> tuple[int, int]:
    """Numbers of values outside the routed experts: of the model's dtype, and of fp32.

    One `A_log` a head: the release stores some more, which are not loaded.
    """
    h, layers = text.hidden, text.num_layers
    shared = 2 * text.vocab * h + h + 2 * layers * h  # embedding, head, norms
    if text.residual_block is not None:
        shared += 2 * h + 4 * layers * h
    kda, kda_wide = _kda_values(text)
    dense = 3 * h * text.dense_width * (layers - len(text.moe_layers))
    narrow = shared + len(text.kda_layers) * kda + len(text.mla_layers) * _mla_values(text)
    narrow += dense + len(text.moe_layers) * _moe_values(text.moe, h)
    wide = len(text.kda_layers) * kda_wide + len(text.moe_layers) * text.moe.num_experts
    return narrow, wide


def _kda_values(text: TextSpec) -> tuple[int, int]:
    h, kda = text.hidden, text.kda
    low_rank = kda.head_dim * (h + kda.inner)
    gate = h * kda.inner if kda.full_rank_gate else low_rank
    narrow = 4 * h * kda.inner + low_rank + gate + h * kda.num_heads
    wide = 3 * kda.inner * kda.conv_taps + kda.inner + kda.head_dim + kda.num_heads
    return narrow, wide


def _mla_values(text: TextSpec) -> int:
    h, mla = text.hidden, text.mla
    q_width = mla.num_heads * (mla.nope_dim + mla.rope_dim)
    rank = mla.q_lora_rank
    query = h * q_width if rank is None else rank * (h + 1 + q_width)
    latent = h * mla.latent_width + mla.kv_lora_rank
    latent += mla.kv_lora_rank * mla.num_heads * (mla.nope_dim + mla.v_dim)
    out = mla.num_heads * mla.v_dim * h
    return query + latent + out * (2 if mla.output_gate else 1)


def _moe_values(moe: MoeSpec, hidden: int) -> int:
    values = hidden * moe.num_experts + 3 * hidden * moe.width * moe.num_shared
    if moe.latent is not None:
        values += 2 * hidden * moe.latent + (moe.latent if moe.latent_norm else 0)
    return values


def vision_values(vision: VisionSpec) -> int:
    """Number of values of the tower and the projector."""
    h = vision.hidden
    start = h * 3 * vision.patch**2 + vision.grid_height * vision.grid_width * h
    block = 2 * h + 4 * h * vision.qkv_width + 2 * h * vision.mlp_width
    merged = vision.merge**2 * h
    projector = merged * merged + vision.text_hidden * (merged + 1)
    return start + vision.num_layers * block + h + projector


# --- what fits ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Pools that fill a budget; `left` bytes remain."""

    slots: int
    pages: int
    left: int


def fit(text: TextSpec, dtype: str, *, memory: int, tokens: int, tensor: int = 1) -> Fit:
    """Divide `memory` bytes of one rank between slots and pages for requests of `tokens` tokens.

    As many requests as fit get a slot and whole pages each; what is left becomes pages, so that
    some requests may be longer. Latents are not cut by tensor parallelism, states are.

    Raises:
        ConfigError: not even one such request fits.
    """
    page, slot = page_bytes(text, dtype), slot_bytes(text, dtype, tensor=tensor)
    pages = -(-tokens // CHUNK)
    requests = memory // (slot + pages * page)
    if requests == 0:
        raise ConfigError(
            f"one request of {tokens} tokens takes {slot + pages * page} bytes and {memory} are "
            "left; give more memory, more tensor ranks or a shorter context"
        )
    spare = memory - requests * slot
    return Fit(slots=requests, pages=spare // page, left=spare % page)


def _share(heads: int, ranks: int) -> int:
    if ranks < 1 or heads % ranks:
        raise ConfigError(f"{heads} heads cannot be cut over {ranks} tensor ranks; use a divisor")
    return heads // ranks
