"""Time whole passes over a slice of the release: four layers of true width, random weights, one
GPU.

    python -m benchmarks.step OUT.jsonl

Decode runs as one captured CUDA graph; before a time is kept, the graph's logits are compared with
those of the same pass run eagerly. Layers: KDA with the dense network, KDA and KDA and MLA with 896
experts. The floor adds up what a step must read and write: weights (of the experts, those chosen),
states, latents.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.ops import BF16, COPY, MATRIX, chunk_plan
from benchmarks.timing import append, machine, measure
from common.config.spec import KdaSpec, MlaSpec, MoeSpec, TextSpec
from common.model.batch import Memory
from common.model.residual import Blocks
from common.model.run import Run
from common.model.text import TextModel
from common.ops.moe.stack import ExpertStack
from common.ops.plan import Chunks, Steps
from common.ops.select import choose, printed
from common.weights.tree import (
    KdaWeights,
    LayerWeights,
    MlaWeights,
    MlpWeights,
    MoeWeights,
    TextWeights,
)

HIDDEN, LATENT, WIDTH, EXPERTS, VOCAB = 7168, 3584, 3072, 896, 163840
SPEC = TextSpec(
    hidden=HIDDEN, num_layers=4, vocab=VOCAB,
    kda=KdaSpec(num_heads=96, head_dim=128, conv_taps=4, gate_lower_bound=-5.0,
    full_rank_gate=True),
    mla=MlaSpec(
        num_heads=96, q_lora_rank=1536, kv_lora_rank=512, nope_dim=128, rope_dim=64, v_dim=128,
        output_gate=True,
    ),
    moe=MoeSpec(
        num_experts=EXPERTS, top_k=16, num_shared=2, width=WIDTH, latent=LATENT, latent_norm=True,
        renormalize=True, scaling=1.0, num_groups=1, top_groups=1,
    ),
    kda_layers=(0, 1, 2), mla_layers=(3,), moe_layers=(1, 2, 3), dense_width=33792,
    activation="situ", situ_beta=4.0, situ_linear_beta=25.0, residual_block=12, eps=1e-5,
    max_position=1 << 20, dtype="bfloat16",
)  # fmt: skip


def normal(*shape: int, dtype: torch.dtype = BF16, scale: float = 0.02) -> torch.Tensor:
    """Random weights on the device."""
    return torch.randn(shape, device="cuda", dtype=dtype) * scale


def weights() -> TextWeights:
    """The slice's weights."""
    one = torch.ones(HIDDEN, device="cuda", dtype=BF16)

    def kda() -> KdaWeights:
        return KdaWeights(
            inputs=normal(4 * 12288 + 128 + 96, HIDDEN), f_b=normal(12288, 128), g_b=None,
            conv=normal(4, 3, 96, 128, dtype=torch.float32, scale=0.5),
            rate=torch.ones(96, device="cuda"), dt_bias=normal(96, 128, dtype=torch.float32),
            o_norm=torch.ones(128, device="cuda"), out=normal(HIDDEN, 12288),
        )  # fmt: skip

    def mla() -> MlaWeights:
        return MlaWeights(
            inputs=normal(1536 + 576 + 12288, HIDDEN), q_norm=one[:1536], q_b=normal(18432, 1536),
            kv_norm=one[:512], kv_b=normal(96, 256, 512), out=normal(HIDDEN, 12288),
        )  # fmt: skip

    def packed(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8, device="cuda").random_(low, high)

    def moe() -> MoeWeights:
        stack = ExpertStack(
            w13=packed(EXPERTS, 2 * WIDTH, LATENT // 2), w2=packed(EXPERTS, LATENT, WIDTH // 2),
            w13_scale=packed(EXPERTS, 2 * WIDTH, LATENT // 32, low=116, high=121),
            w2_scale=packed(EXPERTS, LATENT, WIDTH // 32, low=116, high=121),
        )  # fmt: skip
        return MoeWeights(
            router=normal(EXPERTS, HIDDEN, dtype=torch.float32),
            bias=normal(EXPERTS, dtype=torch.float32), latent_down=normal(LATENT, HIDDEN),
            latent_norm=one[:LATENT], latent_up=normal(HIDDEN, LATENT), experts=stack,
            shared=MlpWeights(gate_up=normal(12288, HIDDEN), down=normal(HIDDEN, 6144)),
        )  # fmt: skip

    dense = MlpWeights(gate_up=normal(2 * 33792, HIDDEN), down=normal(HIDDEN, 33792))
    layers = []
    for layer in range(4):
        layers.append(
            LayerWeights(
                input_norm=one,
                post_norm=one,
                mixer_score=normal(HIDDEN, dtype=torch.float32),
                ffn_score=normal(HIDDEN, dtype=torch.float32),
                mixer=mla() if layer == 3 else kda(),
                ffn=moe() if layer else dense,
            )
        )
    return TextWeights(
        embed=normal(VOCAB, HIDDEN), layers=tuple(layers), norm=one,
        out_score=normal(HIDDEN, dtype=torch.float32), head=normal(VOCAB, HIDDEN),
    )  # fmt: skip


def one_pass(
    model: TextModel, plan: Chunks | Steps, memory: Memory, ids: torch.Tensor
) -> torch.Tensor:
    """Embed, run the layers, and read the logits of `ids`' last rows: all rows of a step."""
    rows = len(ids)
    run = Run(plan=plan, memory=memory, ops=model._ops, tile=None, rows=rows, real=rows)
    residual = Blocks(model.weights, SPEC, model._ops, model.weights.embed[ids])
    for layer in range(SPEC.num_layers):
        model._layer(layer, residual, run)
    wanted = torch.arange(rows, device="cuda") if isinstance(plan, Steps) else plan.lengths[-1:] - 1
    return torch.nn.functional.linear(residual.result(wanted), model.weights.head).float()


def floor_us(batch: int, context: int) -> float:
    """Bytes a decode step of the slice must move, at the copy rate."""
    kda = 2 * (HIDDEN * (4 * 12288 + 224) + 12288 * 128 + HIDDEN * 12288)
    mla = 2 * (HIDDEN * (1536 + 576 + 12288) + 18432 * 1536 + 96 * 256 * 512 + HIDDEN * 12288)
    front = 4 * EXPERTS * HIDDEN + 2 * (2 * LATENT * HIDDEN + 3 * 6144 * HIDDEN)
    used = EXPERTS * (1 - (1 - 16 / EXPERTS) ** batch)
    routed = used * 3 * WIDTH * LATENT * (0.5 + 1 / 32)
    fixed = 3 * kda + mla + 3 * front + 2 * 3 * 33792 * HIDDEN + 2 * VOCAB * HIDDEN
    each = 3 * 96 * (2 * 128 * 128 * 4 + 2 * 9 * 128 * 2) + context * 1152
    return (fixed + 3 * routed + batch * each) / COPY


def decode(model: TextModel, path: Path, batch: int, context: int) -> None:
    """One decode step, captured."""
    pages = -(-context // 64) + 1
    memory = Memory(
        state=torch.zeros(batch, 3, 96, 128, 128, device="cuda"),
        conv=torch.zeros(batch, 3, 96, 3, 3, 128, device="cuda", dtype=BF16),
        latent=normal(batch * pages, 1, 64, 576, scale=1.0),
    )
    plan = Steps(
        slots=torch.arange(batch, device="cuda"),
        starts=torch.full((batch,), context - 1, device="cuda"),
        tables=torch.arange(batch * pages, device="cuda").view(batch, pages),
    )
    ids = torch.randint(0, VOCAB, (batch,), device="cuda")
    case: dict[str, Any] = {"what": "decode", "batch": batch, "context": context}
    with torch.inference_mode():
        eager = one_pass(model, plan, memory, ids)
        memory.state.zero_()
        memory.conv.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = one_pass(model, plan, memory, ids)
        memory.state.zero_()
        memory.conv.zero_()
        graph.replay()
        case["graph_equals_eager"] = bool(torch.equal(eager, replayed))
        case["finite"] = bool(eager.isfinite().all())
        timing = measure([graph.replay], graph=False)
    keep(path, case, timing.us, timing.spread, floor_us(batch, context))


def prefill(model: TextModel, path: Path, tokens: int) -> None:
    """One pass over a prompt."""
    plan = chunk_plan([tokens])
    tables = torch.arange(tokens // 64, device="cuda")[None]
    plan = Chunks(
        slots=plan.slots, first=plan.first, starts=plan.starts, lengths=plan.lengths, tables=tables
    )
    memory = Memory(
        state=torch.zeros(1, 3, 96, 128, 128, device="cuda"),
        conv=torch.zeros(1, 3, 96, 3, 3, 128, device="cuda", dtype=BF16),
        latent=torch.zeros(tokens // 64, 1, 64, 576, device="cuda", dtype=BF16),
    )
    ids = torch.randint(0, VOCAB, (tokens,), device="cuda")
    with torch.inference_mode():
        timing = measure([lambda: one_pass(model, plan, memory, ids)], replays=5, graph=False)
    kda = HIDDEN * (4 * 12288 + 224 + 12288) + 12288 * 128
    mla = HIDDEN * (1536 + 576 + 2 * 12288) + 18432 * 1536 + 96 * 256 * 512 + 96 * 320 * tokens / 2
    front = EXPERTS * HIDDEN + 2 * LATENT * HIDDEN + 3 * 6144 * HIDDEN + 16 * 3 * WIDTH * LATENT
    flops = 2.0 * tokens * (3 * kda + mla + 3 * front + 3 * 33792 * HIDDEN)
    keep(path, {"what": "prefill", "tokens": tokens}, timing.us, timing.spread, flops / MATRIX)


def keep(path: Path, case: dict[str, Any], us: float, spread: float, floor: float) -> None:
    """Write one line and print it."""
    line = {"op": "slice", "case": case, "who": "body", "us": round(us, 1)}
    line |= {
        "spread_us": round(spread, 1),
        "floor_us": round(floor, 1),
        "of_floor": round(floor / us, 3),
    }
    append(path, line | {"machine": machine()})
    print(line, flush=True)


def main() -> None:
    """Decode over batches and contexts, then a prompt."""
    torch.manual_seed(0)
    path = Path(sys.argv[1])
    ops, table = choose(
        "triton" if len(sys.argv) < 3 else sys.argv[2], SPEC, quantization="mxfp4", dtype=BF16,
        device=torch.device("cuda"),
    )  # fmt: skip
    print(printed(table))
    model = TextModel(SPEC, weights(), ops=ops, exact=False)
    cases = ((1, 1024), (8, 8192), (32, 8192), (64, 8192), (128, 4096), (1, 131072), (32, 1024))
    for batch, context in cases:
        decode(model, path, batch, context)
    prefill(model, path, 2048)
    prefill(model, path, 8192)


if __name__ == "__main__":
    main()
