"""FlashInfer's paged attention as a body, against the definition; it compiles at its first use."""

# ruff: noqa: I001 - the support module settles how kernels run, so it comes before them.
from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.support.triton_ops import chunk_plan, off_by, randn, step_plan

from common.config.spec import MlaSpec
from common.ops import mla

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


@pytest.mark.parametrize("heads", [96, 12])
def test_flashinfer_attends_as_defined_in_every_layer_and_pass(heads: int) -> None:
    """Used pages lie beyond 2^32 elements, and entries behind a share's end are not finite."""
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    from common.ops.mla.flashinfer import FlashInferSteps

    spec = MlaSpec(
        num_heads=heads, q_lora_rank=1536, kv_lora_rank=512, nope_dim=128, rope_dim=64, v_dim=128,
        output_gate=True,
    )  # fmt: skip
    body = FlashInferSteps(torch.device("cuda"), spec, BF16)
    pages = torch.empty(4900, 24, 64, 576, device="cuda", dtype=BF16)
    kv_b = randn(heads, 256, 512, dtype=BF16) * 0.05
    for starts in ([2500, 63, 1000], [64, 0, 2558, 127]):
        pages[4700:] = randn(1, 1, 64, 576, dtype=BF16)
        for layer in (5, 23):
            pages[4700:, layer] = randn(200, 64, 576, dtype=BF16)
        tables = (torch.randperm(190, device="cuda")[: 40 * len(starts)] + 4700).view(-1, 40)
        for share, start in enumerate(starts):
            pages[tables[share, start // 64], :, start % 64 + 1 :] = float("nan")
        listed = [
            row[: start // 64 + 1] + [-1] * (39 - start // 64)
            for row, start in zip(tables.tolist(), starts, strict=True)
        ]
        plan = step_plan(list(range(len(starts))), starts, listed)
        for layer in (5, 23):
            q = randn(len(starts), heads, 192, dtype=BF16)
            out = body(q, pages, layer, kv_b, 192**-0.5, plan, None)
            wanted = mla.attend_steps(q, pages, layer, kv_b, 192**-0.5, plan, None)
            assert off_by(out, wanted) < 1.5e-2


@pytest.mark.parametrize("heads", [96, 12])
def test_flashinfer_attends_to_prompts_as_defined(heads: int) -> None:
    """Odd and resumed shares; pages beyond 2^32 elements; what lies behind an end is not finite."""
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed")
    from common.ops.mla.flashinfer_chunk import FlashInferChunks

    body = FlashInferChunks(torch.device("cuda"))
    lengths, starts = [700, 1, 1500, 64], [0, 128, 64, 640]
    plan = chunk_plan(lengths, list(range(4)))
    pages = torch.empty(4900, 24, 64, 576, device="cuda", dtype=BF16)
    order, tables = torch.randperm(199, device="cuda") + 4700, []
    for layer in (5, 23):
        pages[4700:, layer] = randn(200, 64, 576, dtype=BF16)
    for share, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        owned = order[share * 40 : share * 40 + -(-(start + length) // 64)].tolist()
        pages[owned[-1], :, (start + length - 1) % 64 + 1 :] = float("nan")
        tables.append(owned + [-1] * (40 - len(owned)))
    plan = dataclasses.replace(
        plan,
        starts=torch.tensor(starts, device="cuda"),
        tables=torch.tensor(tables, device="cuda"),
    )
    kv_b = randn(heads, 256, 512, dtype=BF16) * 0.05
    real = torch.arange(64, device="cuda") < plan.lengths.unsqueeze(1)
    for layer in (5, 23):
        q = randn(len(plan.lengths), 64, heads, 192, dtype=BF16)
        out = body(q, pages, layer, kv_b, 192**-0.5, plan, None)
        wanted = mla.attend_chunks(q, pages, layer, kv_b, 192**-0.5, plan, None)
        assert off_by(out[real], wanted[real]) < 1.5e-2
        assert out.isfinite().all()
