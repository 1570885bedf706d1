"""Time op bodies at the release's shapes: body, definition, peer and floor in one run.

    python -m benchmarks.ops OUT.jsonl [op ...]

One JSON line a case: who, microseconds (median, half the middle half's width), and the floor, which
is the larger of the bytes that must move at the copy rate and the flops at the matrix rate, both
measured on this kind of device. Peers are optional: one that is not installed is left out by name.
No result is checked here: the parity tests do that first.

Longer than 300 lines because it is a list of cases, an op after another.
"""

# ruff: noqa: B023 - every closure is called before its loop goes on.
from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import REPLAYS, append, machine, measure
from common.ops import act, attnres, conv, digest, kda, mla, moe, norm
from common.ops.act import Activation
from common.ops.kda import Mixer
from common.ops.plan import Chunks, Steps

COPY = 4274e3  # bytes a microsecond, read plus written
MATRIX = 680e6  # bf16 flops a microsecond
BF16 = torch.bfloat16
SITU = Activation(kind="situ", beta=4.0, linear_beta=25.0)
Calls = Sequence[Callable[[], object]]


class Report:
    """Writes each timing as a line and prints it."""

    def __init__(self, path: Path, only: Sequence[str]) -> None:
        """Remember where to write, and which ops to run; none given means all."""
        self.path, self.only, self.machine = path, only, machine()

    def __call__(
        self, op: str, case: dict[str, Any], who: str, calls: Calls, *, bytes_: float = 0.0,
        flops: float = 0.0, graph: bool = True, replays: int = REPLAYS,
    ) -> None:  # fmt: skip
        """Time one case and keep it; a body that cannot run here is kept with its reason."""
        floor = max(bytes_ / COPY, flops / MATRIX)
        line: dict[str, Any] = {"op": op, "case": case, "who": who, "floor_us": round(floor, 2)}
        try:
            timing = measure(calls, graph=graph, replays=replays)
            line |= {"us": round(timing.us, 2), "spread_us": round(timing.spread, 2)}
            line["of_floor"] = round(floor / timing.us, 3)
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {str(error)[:200]}"
            torch.cuda.synchronize()
        append(self.path, line | {"machine": self.machine})
        facts = " ".join(f"{k}={v}" for k, v in case.items())
        told = line.get("error") or f"{line['us']:>10.1f} us  {line['of_floor']:.3f} of the floor"
        print(f"{op:10} {facts:34} {who:18} {told}", flush=True)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers on the device."""
    return torch.randn(shape, device="cuda").to(dtype)


def mixer(heads: int) -> Mixer:
    """A layer's parameters."""
    return Mixer(
        conv=randn(4, 3, heads, 128), rate=torch.rand(heads, device="cuda") + 0.5,
        bias=randn(heads, 128) * 0.3, lower_bound=-5.0, norm=torch.ones(128, device="cuda"),
        eps=1e-5,
    )  # fmt: skip


def kda_steps(report: Report) -> None:
    """Row 1: one token for a batch, slots scattered over a pool, four layers in turn."""
    from common.ops.kda import triton_step

    for heads, batches in ((96, (1, 8, 32, 64, 128, 256)), (12, (1, 32, 256))):
        parts, layers = mixer(heads), 4
        state = randn(260, layers, heads, 128, 128)
        window = randn(260, layers, heads, 3, 3, 128, dtype=BF16)
        for batch in batches:
            raw, f, gate = (randn(batch, 3, heads, 128, dtype=BF16) for _ in range(3))
            f, gate, beta = f[:, 0], gate[:, 0], randn(batch, heads, dtype=BF16)
            slots = torch.randperm(260, device="cuda")[:batch]
            plan = Steps(slots=slots, starts=slots, tables=slots[:, None])
            out = torch.empty(batch, heads, 128, device="cuda", dtype=BF16)
            moved = batch * heads * (2 * 128 * 128 * 4 + 2 * 9 * 128 * 2 + 6 * 128 * 2)
            case = {"heads": heads, "batch": batch}

            def body(layer: int, warps: int) -> None:
                triton_step.launch(
                    raw, parts.conv, f, parts.rate, parts.bias, -5.0, beta, gate, parts.norm, 1e-5,
                    state[:, layer], window[:, layer], slots, out, warps=warps,
                )  # fmt: skip

            rounds = 40 if batch <= 8 else 8
            forms = {"body": triton_step.WARPS, "body, 4 warps": 4, "body, 16 warps": 16}
            for who, warps in forms.items():
                calls = [lambda i=i, warps=warps: body(i % layers, warps) for i in range(rounds)]
                report("kda_step", case, who, calls, bytes_=moved)
            if heads == 96 and batch in (1, 32, 256):
                _fla_step(report, case, state, raw, f, beta, gate, parts, slots, moved)
            if heads == 96 and batch == 32:

                def definition(layer: int) -> None:
                    u = conv.conv_steps(raw, parts.conv, window, layer, plan)
                    g = kda.gate(f, parts.rate, parts.bias, -5.0)
                    o = kda.steps(*u.unbind(1), g, beta.float().sigmoid(), state, layer, plan)
                    norm.gated_rms_norm(o, gate, parts.norm, 1e-5)

                calls = [lambda i=i: definition(i) for i in range(layers)]
                report("kda_step", case, "definition", calls, bytes_=moved, graph=False)


def _fla_step(
    report: Report, case: dict[str, Any], state: torch.Tensor, raw: torch.Tensor, f: torch.Tensor,
    beta: torch.Tensor, gate: torch.Tensor, parts: Mixer, slots: torch.Tensor, moved: float,
) -> None:  # fmt: skip
    try:
        from fla.modules.causal_conv1d.ops import causal_conv1d_update
        from fla.modules.norm.fused_norm_gate import rms_norm_gated
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
    except ImportError:
        return
    batch, heads = beta.shape
    q = randn(1, batch, heads, 128, dtype=BF16)
    begins = torch.arange(batch + 1, device="cuda")
    rate, bias, places = parts.rate.log(), parts.bias.flatten(), slots.to(torch.int32)
    window = torch.zeros(batch, 3 * heads * 128, 4, device="cuda", dtype=BF16)
    weight, x = randn(3 * heads * 128, 4, dtype=BF16), raw.view(batch, 1, -1)

    def recurrence(layer: int) -> Any:
        return fused_recurrent_kda_fwd(
            q, q, q, f.reshape(1, batch, heads, 128), beta.view(1, batch, heads), A_log=rate,
            dt_bias=bias, initial_state=state[:, layer], state_v_first=True, cu_seqlens=begins,
            ssm_state_indices=places, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, lower_bound=-5.0, inplace_final_state=True,
        )[0]  # fmt: skip

    def chain(layer: int) -> None:
        causal_conv1d_update(x, window, weight=weight, activation="silu")
        o = recurrence(layer).view(-1, 128)
        rms_norm_gated(o, gate.reshape(-1, 128), parts.norm, None, activation="sigmoid", eps=1e-5)

    rounds = 40 if batch <= 8 else 8
    with torch.no_grad():
        only = batch * heads * 2 * 128 * 128 * 4
        calls = [lambda i=i: recurrence(i % 4) for i in range(rounds)]
        report("kda_step", case, "fla, recurrence", calls, bytes_=only)
        calls = [lambda i=i: chain(i % 4) for i in range(rounds)]
        report("kda_step", case, "fla, chain", calls, bytes_=moved)


def chunk_plan(lengths: Sequence[int]) -> Chunks:
    """Shares of these lengths in slots 0, 1, ..."""
    first, rows = [0], []
    for length in lengths:
        rows += [min(64, length - at) for at in range(0, length, 64)]
        first.append(len(rows))
    places = torch.arange(len(lengths), device="cuda")
    return Chunks(
        slots=places, first=torch.tensor(first, device="cuda"), starts=places * 0,
        lengths=torch.tensor(rows, device="cuda"), tables=places[:, None],
    )  # fmt: skip


def kda_chunks(report: Report) -> None:
    """Row 2: prefill; logits of the gate and states in slots, before the output norm."""
    from common.ops.kda import triton_chunk

    parts, heads = mixer(96), 96
    cases = [[1024], [4096], [8192], [16384], [1000, 2900, 60, 4100], [2048] * 8, [65536]]
    for lengths in cases:
        plan = chunk_plan(lengths)
        chunks, tokens = len(plan.lengths), sum(lengths)
        q, k, v = randn(chunks, 64, 3, heads, 128, dtype=BF16).unbind(2)
        f, beta = randn(chunks, 64, heads, 128, dtype=BF16), randn(chunks, 64, heads, dtype=BF16)
        state = randn(len(lengths), 1, heads, 128, 128) * 0.3
        out = torch.empty(chunks, 64, heads, 128, device="cuda", dtype=BF16)
        case = {"tokens": tokens, "requests": len(lengths)}
        need = {"bytes_": tokens * heads * 128 * 2 * 5, "flops": tokens * heads * 128 * 128 * 6.0}

        def body() -> None:
            triton_chunk.launch(
                q, k, v, f, beta, parts.rate, parts.bias, -5.0, state[:, 0], plan, out
            )

        report("kda_chunks", case, "body", [body], **need)
        if tokens == 1024:
            g, b = kda.gate(f.flatten(0, 1), parts.rate, parts.bias, -5.0), beta.float().sigmoid()
            call = [lambda: kda.chunks(q, k, v, g.view(f.shape), b, state, 0, plan)]
            report("kda_chunks", case, "definition", call, graph=False, **need)
        if tokens <= 16384 and tokens % 64 == 0:
            _fla_chunks(report, case, lengths, (q, k, v, f, beta), parts, need)


def _fla_chunks(
    report: Report, case: dict[str, Any], lengths: Sequence[int], given: tuple[torch.Tensor, ...],
    parts: Mixer, need: dict[str, float],
) -> None:  # fmt: skip
    try:
        from fla.ops.kda import chunk_kda
    except ImportError:
        return
    q, k, v, f, beta = (x.flatten(0, 1).contiguous()[None] for x in given)
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    state = torch.zeros(len(lengths), 96, 128, 128, device="cuda")

    def call() -> None:
        chunk_kda(
            q, k, v, f, beta, initial_state=state, output_final_state=True, state_v_first=True,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            safe_gate=True, lower_bound=-5.0, A_log=parts.rate.log(), dt_bias=parts.bias.flatten(),
            cu_seqlens=ends if len(lengths) > 1 else None,
        )  # fmt: skip

    with torch.no_grad():
        report("kda_chunks", case, "fla chunk_kda", [call], graph=False, **need)


def experts(report: Report) -> None:
    """Rows 3 and 4: experts as the room fits them, and the same products on each unit alone."""
    from benchmarks.unpacking import bare_experts
    from common.ops.moe import triton as fast
    from common.ops.moe import triton_split
    from common.ops.moe.deepgemm import DeepGemm, Fp8Experts, to_fp8, unavailable

    width, inner = 3584, 3072
    why, bare = unavailable(torch.device("cuda")), bare_experts()
    for count, loads in ((56, (1, 4, 16, 64, 512)), (896, (1, 4, 8, 16, 32, 64, 128, -36, -146))):
        stack = triton_split.based(
            moe.ExpertStack(
                w13=_bytes(count, 2 * inner, width // 2), w2=_bytes(count, width, inner // 2),
                w13_scale=_bytes(count, 2 * inner, width // 32, low=116, high=121),
                w2_scale=_bytes(count, width, inner // 32, low=116, high=121),
            )
        )  # fmt: skip
        assert stack is not None
        narrow = to_fp8(stack) if count == 56 and why is None else None
        for load in loads:
            ids, case = _choices(count, load)
            rows = len(ids)
            x, weights = randn(rows, width, dtype=BF16), torch.rand(rows, 16, device="cuda")
            used = min(count, rows * 16)
            need = {
                "bytes_": used * 3 * inner * width * (0.5 + 1 / 32),
                "flops": 6.0 * inner * width * rows * 16,
            }
            call = [lambda: fast.experts(x, ids, weights, stack, SITU, None)]
            report("experts", case, "body, whole op", call, **need)
            products = fast.products(x, ids, stack, SITU)
            report("experts", case, "bf16 unit, two products", [products], **need)
            if abs(load) > 16:
                products = bare.products(x, ids, stack, SITU)
                report("experts", case, "bf16 unit, nothing unpacked", [products], **need)
            else:
                products = triton_split.products(x, ids, stack, SITU)
                report("experts", case, "FP8 unit, two products", [products], **need)
            for who, is_masked in (("masked", True), ("contiguous", False)):
                if narrow is not None:
                    body = Fp8Experts(DeepGemm())
                    call = [lambda: body(x, ids, weights, narrow, SITU, None, is_masked=is_masked)]
                    report("experts", case, f"FP8 weights, DeepGEMM {who}", call, **need)
            if count == 56 and load == 16:
                call = [lambda: moe.experts(x, ids, weights, stack, SITU, None)]
                report("experts", case, "definition", call, graph=False, **need)


def _choices(count: int, load: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """Sixteen experts a row: `load` rows an expert, or below zero as many on average, drawn."""
    rows = max(1, abs(load) * count // 16)
    if load > 0:
        ids = torch.arange(rows, device="cuda")[:, None] * 16 + torch.arange(16, device="cuda")
        ids, told = ids * 5 % count, str(load)
    else:
        ids = torch.rand(rows, count, device="cuda").topk(16, -1).indices
        each = torch.bincount(ids.flatten(), minlength=count)
        told = f"{-load}, drawn, {int(each.min())} to {int(each.max())}"
    return ids.sort(-1).values, {"experts": count, "tokens_each": told}


def draws(report: Report) -> None:
    """Row 9: the choice of tokens over the release's vocabulary; the floor reads logits once."""
    from common.contract.messages import Sampling
    from common.sampling import device, sampler
    from common.sampling.history import History
    from common.sampling.masks import Line
    from common.sampling.rows import Row

    kinds = {
        "greedy": Sampling(temperature=0),
        "draw": Sampling(),
        "draw, min_p": Sampling(min_p=0.05),
        "greedy, 5 logprobs": Sampling(temperature=0, logprobs=5),
        "draw, top_p": Sampling(top_p=0.9),
        "draw, top_p, flat": Sampling(top_p=0.99, temperature=2.0),
        "draw, top_k": Sampling(top_k=50),
        "draw, penalties": Sampling(presence=0.5, frequency=0.1, repetition=1.1),
        "draw, everything": Sampling(
            top_k=50, top_p=0.9, min_p=0.01, repetition=1.1, presence=0.5, logprobs=5
        ),
        "draw, grammar": Sampling(),
    }
    vocab = 163_840
    block = torch.full((256, vocab // 8), 0x5A, dtype=torch.uint8, pin_memory=True)
    for rows in (256, 1):
        logits, lines = 3 * randn(rows, vocab), block[:rows]
        for kind, sampling in kinds.items():
            seen = {i * 7: 1 + i % 3 for i in range(500)}
            batch = [
                Row(
                    sampling=sampling, position=i, counts=history.counts, history=history,
                    mask=Line(lines, i) if kind == "draw, grammar" else None,
                )
                for i, history in enumerate(History(sampling, tokens=seen) for _ in range(rows))
            ]  # fmt: skip
            case = {"rows": rows, "kind": kind}
            enqueue = device.prepared(logits, batch)
            report("draw", case, "body", [enqueue] * 4, bytes_=logits.nbytes)

            def call() -> None:
                for row, outcome in zip(batch, device.launch(logits, batch).result(), strict=True):
                    assert row.history is not None
                    row.history.take(outcome.token.id)

            report(
                "draw", case, "body, from rows to tokens", [call], bytes_=logits.nbytes, graph=False
            )
            if rows == 1:
                alone = [lambda: sampler._together(logits, batch)]
                report("draw", case, "torch's kernels", alone, bytes_=logits.nbytes, graph=False)


def fronts(report: Report) -> None:
    """Row 7: merged front products against their weights' bytes, and the router beside the latent
    projection, one after the other and on two streams."""
    from common.ops.moe import triton_route

    linear = torch.nn.functional.linear
    router, bias = randn(896, 7168), randn(896) * 0.1
    shapes = {"KDA front": 4 * 12288 + 224, "MLA front": 1536 + 576 + 12288, "latent": 3584}
    weights = {name: [randn(n, 7168, dtype=BF16) for _ in (0, 1)] for name, n in shapes.items()}
    side = torch.cuda.Stream()
    for rows in (1, 8, 32, 64, 128):
        x = randn(rows, 7168, dtype=BF16)
        for name, pair in weights.items():
            calls = [lambda w=w: linear(x, w) for w in pair]
            report("front", {"what": name, "rows": rows}, "body", calls, bytes_=pair[0].nbytes)

        def choose(x: torch.Tensor = x) -> None:
            triton_route.route(linear(x.float(), router), bias, top_k=16)

        def after(x: torch.Tensor = x) -> None:
            choose(x)
            linear(x, weights["latent"][0])

        def beside(x: torch.Tensor = x) -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                choose(x)
            linear(x, weights["latent"][0])
            torch.cuda.current_stream().wait_stream(side)

        need = {"bytes_": weights["latent"][0].nbytes + router.nbytes}
        case = {"what": "router and latent", "rows": rows}
        report("front", case, "router alone", [choose] * 4, bytes_=router.nbytes)
        report("front", case, "body", [after] * 4, **need)
        report("front", case, "two streams", [beside] * 4, **need)


def routers(report: Report) -> None:
    """Row 3's router of a prompt: the weights' three bf16 parts, and a product in fp32."""
    from common.ops.rows import triton as fast

    weight = randn(896, 7168) * 0.02
    for rows in (512, 2048, 8192):
        inputs = [randn(rows, 7168, dtype=BF16) for _ in range(3)]
        need = {"bytes_": weight.nbytes + inputs[0].nbytes, "flops": 6.0 * rows * 896 * 7168}
        calls = [lambda x=x: fast.widened(x, weight, None) for x in inputs]
        report("router", {"rows": rows}, "body", calls, **need)
        calls = [lambda x=x: torch.nn.functional.linear(x.float(), weight) for x in inputs]
        report("router", {"rows": rows}, "fp32 by the library", calls, **need)


def tower(report: Report) -> None:
    """Row 8: the vision tower by a captured pass, and its attention alone."""
    from common.config.spec import VisionSpec
    from common.ops.select import choose_vision
    from common.ops.vit import triton as fast
    from common.weights.tree import VisionLayerWeights, VisionWeights
    from services.encoder.budgets import BudgetTower
    from services.encoder.moonvit import MoonVit

    spec = VisionSpec(
        patch=14, merge=2, grid_height=64, grid_width=64, hidden=1024, num_layers=27, num_heads=12,
        qkv_width=1536, mlp_width=4096, text_hidden=7168, projector_eps=1e-5,
    )  # fmt: skip

    def weight(*shape: int) -> torch.Tensor:
        return randn(*shape, dtype=BF16) * shape[-1] ** -0.5

    one = torch.ones(7168, device="cuda", dtype=BF16)
    layers = tuple(
        VisionLayerWeights(
            norm0=one[:1024], norm1=one[:1024], wqkv=weight(4608, 1024), wo=weight(1024, 1536),
            fc0=weight(4096, 1024), fc1=weight(1024, 4096),
        )
        for _ in range(27)
    )  # fmt: skip
    weights = VisionWeights(
        patch=weight(1024, 588), pos=weight(64, 64, 1024), layers=layers, norm=one[:1024],
        project0=weight(4096, 4096), project2=weight(7168, 4096), post_norm=one,
    )  # fmt: skip
    ops = choose_vision("triton", spec, dtype=BF16, device=torch.device("cuda"))
    plain = MoonVit(spec, weights, ops=ops, exact=False)
    for images, side in ((1, 74), (8, 38), (8, 74), (64, 74)):
        each = side * side
        pictures = [
            (_bytes(each, 3, 14, 14).cpu().pin_memory(), (side, side)) for _ in range(images)
        ]
        budgets = BudgetTower(plain, (images * each,))
        graph = budgets.forward(pictures)
        held = budgets._passes[images * each]
        eager = plain.embed(held.pixels, held.places, held.layout)
        same = torch.equal(torch.cat(graph), eager[: images * each // 4])
        block = 1024 * (4608 + 1536 + 8192) + 2 * each * 1536
        need = {"flops": 2.0 * images * each * (27 * block + 588 * 1024 + 1024 * (4096 + 7168))}
        case = {"images": images, "side": side * 14, "graph_equals_eager": same}
        report("tower", case, "body, replayed", [held.run], graph=False, **need)
        report(
            "tower",
            case,
            "body, from pixels",
            [lambda: budgets.forward(pictures)],
            graph=False,
            **need,
        )
        qkv = randn(images * each, 3, 12, 128, dtype=BF16)
        call = [lambda: fast.attend(qkv, held.layout)]
        report("tower", case, "attention alone", call, flops=4.0 * images * each * each * 1536)


def _bytes(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8, device="cuda").random_(low, high)


def residuals(report: Report) -> None:
    """Row 6: the pending add, the mixture and the norm that follows."""
    from common.ops.attnres import triton as fast

    for rows in (32, 4096, 16384):
        prefix, bank, more = (
            randn(*s, dtype=BF16) for s in ((rows, 7168), (rows, 8, 7168), (rows, 7168))
        )
        score, weight = randn(7168) * 0.02, torch.rand(7168, device="cuda").to(BF16)
        for readable in (0, 1, 2, 4, 6, 8):
            options: dict[str, Any] = {"eps": 1e-5, "pending": more, "norm": weight}
            case, moved = {"rows": rows, "sources": readable + 1}, rows * 7168 * 2 * (readable + 4)
            calls = [lambda: fast.read(prefix, bank, readable, score, **options)] * 4
            report("attnres", case, "body", calls, bytes_=moved)
            if rows == 4096 and readable == 8:
                call = [lambda: attnres.read(prefix, bank, readable, score, **options)]
                report("attnres", case, "definition", call, bytes_=moved)


def digests(report: Report) -> None:
    """Row 11: one request of 8,192 tokens."""
    from common.ops.digest import reference

    state = randn(2, 69, 96, 128, 128)
    window = randn(2, 69, 96, 3, 3, 128, dtype=BF16)
    pages, listed = randn(140, 24, 64, 576, dtype=BF16), torch.randperm(140)[:128].tolist()

    parts = [
        digest.Rows(values=state[1:], at=0),
        digest.Rows(values=window[1:], at=69),
        digest.Rows(values=pages, at=138, pages=listed),
    ]
    summing = digest.Summing([str(number) for number in range(162)], pages.device)

    def slow() -> None:
        for part in parts:
            rows = part.values if part.pages is None else part.values[listed]
            reference.digest_pages(rows)

    moved = 69 * 96 * 128 * (128 * 4 + 18) + 128 * 24 * 64 * 576 * 2
    for who, call in (("body", lambda: summing.add(parts)), ("definition", slow)):
        report("digest", {"bytes": moved}, who, [call] * 4, bytes_=moved, graph=False)


def attention(report: Report) -> None:
    """Row 5: absorbed attention over pages."""
    from common.ops.mla import triton as fast

    for batch, context in ((32, 8192), (8, 32768), (128, 2048), (1, 131072)):
        count = context // 64
        pool = randn(batch * count, 2, 64, 576, dtype=BF16)
        plan = Steps(
            slots=torch.arange(batch, device="cuda"),
            starts=torch.full((batch,), context - 1, device="cuda"),
            tables=torch.randperm(batch * count, device="cuda").view(batch, count),
        )
        for heads in (96, 12):
            q = randn(batch, heads, 576, dtype=BF16)
            issued = 128 if heads == 96 else 16  # rows the matrix unit is given
            need = {"bytes_": batch * context * 1152.0}
            need["flops"] = 2.0 * batch * context * (576 + 512) * issued
            case = {"batch": batch, "context": context, "heads": heads}
            calls = [
                lambda i=i: fast.attend_latents(q, pool[:, i], 512, 192**-0.5, plan) for i in (0, 1)
            ]
            report("mla_steps", case, "body: triton", calls, **need)
            _flashinfer(report, case, q, pool, plan, context, need)
            if batch == 8 and heads == 96:
                kv_b, query = (
                    randn(heads, 256, 512, dtype=BF16),
                    randn(batch, heads, 192, dtype=BF16),
                )
                call = [lambda: mla.attend_steps(query, pool, 0, kv_b, 192**-0.5, plan, None)]
                report("mla_steps", case, "definition", call, graph=False, **need)


def _flashinfer(
    report: Report, case: dict[str, Any], q: torch.Tensor, pool: torch.Tensor, plan: Steps,
    context: int, need: dict[str, float],
) -> None:  # fmt: skip
    try:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper
    except ImportError:
        return
    batch, heads, _ = q.shape
    wrapper = BatchMLAPagedAttentionWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), backend="fa3"
    )
    count = plan.tables.shape[1]
    places = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    wrapper.plan(
        places, places * count, plan.tables.flatten().int(),
        torch.full((batch,), context, dtype=torch.int32, device="cuda"), heads, 512, 64, 64, False,
        192**-0.5, BF16, BF16,
    )  # fmt: skip
    main, rest = q[..., :512].contiguous(), q[..., 512:].contiguous()
    out = torch.empty_like(main)
    calls = [
        lambda i=i: wrapper.run(main, rest, pool[:, i, :, :512], pool[:, i, :, 512:], out=out)
        for i in (0, 1)
    ]
    report("mla_steps", case, "body: flashinfer", calls, **need)


def prefill_attention(report: Report) -> None:
    """Row 5's second half: causal attention of a prompt, keys and values expanded on the way."""
    from common.ops.mla import triton_chunk

    for tokens in (2048, 8192):
        plan, count = chunk_plan([tokens]), tokens // 64
        tables = torch.arange(count, device="cuda")[None]
        plan = dataclasses.replace(plan, tables=tables)
        pages = randn(count, 1, 64, 576, dtype=BF16)
        q, kv_b = randn(count, 64, 96, 192, dtype=BF16), randn(96, 256, 512, dtype=BF16) * 0.05
        expand = 2.0 * tokens * 512 * 96 * 256
        need = {"flops": expand + 96 * 2.0 * (192 + 128) * tokens * tokens / 2}
        call = [lambda: triton_chunk.attend_chunks(q, pages, 0, kv_b, 192**-0.5, plan, None)]
        report("mla_chunks", {"tokens": tokens}, "body", call, **need)
        try:
            from common.ops.mla.flashinfer_chunk import FlashInferChunks

            body = FlashInferChunks(torch.device("cuda"))
            call = [lambda: body(q, pages, 0, kv_b, 192**-0.5, plan, None)]
            report("mla_chunks", {"tokens": tokens}, "body: flashinfer", call, graph=False, **need)
        except ImportError:
            pass
        if tokens == 2048:
            call = [lambda: mla.attend_chunks(q, pages, 0, kv_b, 192**-0.5, plan, None)]
            report("mla_chunks", {"tokens": tokens}, "definition", call, graph=False, **need)


def small(report: Report) -> None:
    """Row 7's choice, and what stands between the large ops."""
    from common.ops.act import triton as fast_act
    from common.ops.conv import triton as fast_conv
    from common.ops.moe import triton_route
    from common.ops.norm import triton as fast_norm

    bias = randn(896) * 0.1
    for rows in (1, 64, 8192):
        logits, moved = randn(rows, 896), rows * (896 * 4 + 16 * 12)
        for who, route in (("body", triton_route.route), ("definition", moe.route)):
            calls = [lambda: route(logits, bias, top_k=16)] * 10
            report("route", {"rows": rows}, who, calls, bytes_=moved)
    x, weight = randn(8192, 7168, dtype=BF16), torch.rand(7168, device="cuda").to(BF16)
    for who, rms in (("body", fast_norm.rms_norm), ("definition", norm.rms_norm)):
        report(
            "rms_norm", {"rows": 8192}, who, [lambda: rms(x, weight, 1e-5)] * 4, bytes_=x.nbytes * 2
        )
    x = randn(8192, 12288, dtype=BF16)
    for who, activate in (("body", fast_act.activate), ("definition", act.activate)):
        report(
            "situ",
            {"rows": 8192, "width": 6144},
            who,
            [lambda: activate(x, SITU)] * 4,
            bytes_=x.nbytes * 1.5,
        )
    raw, taps = randn(128, 64, 3, 96, 128, dtype=BF16), randn(4, 3, 96, 128)
    pool, plan = randn(2, 1, 96, 3, 3, 128, dtype=BF16), chunk_plan([4992, 3200])
    for who, convolve in (("body", fast_conv.conv_chunks), ("definition", conv.conv_chunks)):
        call = [lambda: convolve(raw, taps, pool, 0, plan)]
        report("conv", {"tokens": 8192}, who, call, bytes_=raw.nbytes * 2, graph=who == "body")


OPS = {
    "kda_step": kda_steps, "digest": digests, "attnres": residuals, "small": small,
    "mla_steps": attention, "mla_chunks": prefill_attention, "experts": experts,
    "kda_chunks": kda_chunks, "draw": draws, 
    "tower": tower, "front": fronts, "router": routers,
}  # fmt: skip


def main() -> None:
    """Run the ops named on the command line, or all."""
    torch.manual_seed(0)
    report = Report(Path(sys.argv[1]), sys.argv[2:])
    for name in sys.argv[2:] or OPS:
        OPS[name](report)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
