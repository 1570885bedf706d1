"""The other Triton bodies against their definitions."""

# ruff: noqa: I001 - the support module settles how kernels run, so it comes before them.
from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.support.triton_ops import DEVICE, chunk_plan, off_by, randn, step_plan

from common.errors import BackendUnsupported
from common.ops import act, attnres, conv, digest, mla, moe, norm, quant
from common.ops.act import Activation
from common.ops.act import triton as fast_act
from common.ops.attnres import triton as fast_attnres
from common.ops.conv import triton as fast_conv
from common.ops.digest import reference as slow_digest
from common.ops.digest import Rows, Summing
from common.ops.digest import triton as fast_digest
from common.ops.mla import triton as fast_mla
from common.ops.mla import triton_chunk as mla_chunk
from common.ops.moe import triton as fast_moe
from common.ops.moe import triton_route
from common.ops.norm import triton as fast_norm
from common.ops.quant import triton as fast_quant

SITU = Activation(kind="situ", beta=4.0, linear_beta=25.0)
SILU = Activation(kind="silu")
pytestmark = pytest.mark.filterwarnings(  # of the interpreter: numpy scalars, masked overflows
    "ignore::DeprecationWarning", "ignore::RuntimeWarning"
)
BF16 = torch.bfloat16


@pytest.mark.parametrize("activation", [SITU, SILU], ids=["situ", "silu"])
def test_activations_equal_their_formulas(activation: Activation) -> None:
    x = randn(7, 2 * 96) * torch.logspace(-6, 2, 2 * 96, device=DEVICE)
    torch.testing.assert_close(
        fast_act.activate(x, activation), act.activate(x, activation), rtol=1e-5, atol=1e-12
    )


def test_norms_equal_their_formulas_on_strided_rows() -> None:
    x, weight = randn(5, 3, 48)[:, 1], randn(48)
    assert off_by(fast_norm.rms_norm(x, weight, 1e-5), norm.rms_norm(x, weight, 1e-5)) < 1e-6
    x, gate, weight = randn(5, 3, 32), randn(5, 6, 32)[:, :3], randn(32)
    wanted = norm.gated_rms_norm(x, gate, weight, 1e-5)
    assert off_by(fast_norm.gated_rms_norm(x, gate, weight, 1e-5), wanted) < 1e-6


@pytest.mark.parametrize("readable", [0, 1, 2, 5])
@pytest.mark.parametrize("write_row", [None, 0, 5])
def test_a_residual_read_folds_mixes_norms_and_stores(readable: int, write_row: int | None) -> None:
    prefix, bank, score, more, weight = (
        randn(4, 48),
        randn(4, 6, 48),
        randn(48),
        randn(4, 48),
        randn(48),
    )
    mine, theirs = bank.clone(), bank.clone()
    options = {"eps": 1e-5, "pending": more, "norm": weight, "write_row": write_row}
    out, total = fast_attnres.read(prefix, mine, readable, score, **options)
    wanted, total_wanted = attnres.read(prefix, theirs, readable, score, **options)
    assert off_by(out, wanted) < 1e-5
    assert torch.equal(total, total_wanted)
    assert torch.equal(mine, theirs)


def test_the_convolution_continues_short_and_long_shares() -> None:
    plan = chunk_plan([2, 70, 1, 64, 3], [4, 0, 2, 1, 3])
    raw, weight, pool = (
        randn(len(plan.lengths), 64, 3, 2, 32),
        randn(4, 3, 2, 32),
        randn(5, 2, 2, 3, 3, 32),
    )
    mine, theirs = pool.clone(), pool.clone()
    out = fast_conv.conv_chunks(raw, weight, mine, 1, plan)
    wanted = conv.conv_chunks(raw, weight, theirs, 1, plan)
    real = torch.arange(64, device=DEVICE) < plan.lengths.unsqueeze(1)
    assert off_by(out[real], wanted[real]) < 1e-6
    assert out.isfinite().all()
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("experts", [16, 56])
def test_the_router_chooses_and_weighs_as_defined(experts: int) -> None:
    logits, bias = randn(9, experts), randn(experts) * 0.1
    ids, weights = triton_route.route(logits, bias, top_k=6, scaling=2.0)
    ids_wanted, weights_wanted = moe.route(logits, bias, top_k=6, scaling=2.0)
    assert torch.equal(ids, ids_wanted)
    assert off_by(weights, weights_wanted) < 1e-6


@pytest.mark.parametrize("tail", [0, 16], ids=["whole", "tail"])
@pytest.mark.parametrize("rows", [1, 5, 37, 90])
def test_packed_experts_equal_the_loop_over_them(rows: int, tail: int) -> None:
    """With a tail of 16, experts of up to 16, up to 32, up to 48 and more rows."""
    count, inner, width, top = 6, 128, 256, 3
    w13, w13_scale = quant.pack_mxfp4(randn(count, 2 * inner, width).cpu() * 0.05)
    w2, w2_scale = quant.pack_mxfp4(randn(count, width, inner).cpu() * 0.05)
    packed = [x.to(DEVICE) for x in (w13, w2, w13_scale, w2_scale)]
    stack = moe.ExpertStack(w13=packed[0], w2=packed[1], w13_scale=packed[2], w2_scale=packed[3])
    assert fast_moe.unsupported(stack) is None
    ids = torch.stack([torch.randperm(count)[:top].sort().values for _ in range(rows)]).to(DEVICE)
    x, weights = randn(rows, width), torch.rand(rows, top, device=DEVICE)
    height = 32 if tail else 16
    tiles = fast_moe.Tiling(rows=height, tail=tail, width=64, depth=128, stages=2, warps=4)
    out = fast_moe.experts(x, ids, weights, stack, SITU, None, tiles=(tiles, tiles))
    assert off_by(out, moe.experts(x, ids, weights, stack, SITU, None)) < 1e-5


def test_experts_of_a_shard_whose_width_is_an_odd_multiple_of_128() -> None:
    w13, w13_scale = quant.pack_mxfp4(randn(1, 2 * 384, 128).cpu() * 0.05)
    w2, w2_scale = quant.pack_mxfp4(randn(1, 128, 384).cpu() * 0.05)
    packed = [x.to(DEVICE) for x in (w13, w2, w13_scale, w2_scale)]
    stack = moe.ExpertStack(w13=packed[0], w2=packed[1], w13_scale=packed[2], w2_scale=packed[3])
    x, ids = randn(2, 128), torch.zeros(2, 1, dtype=torch.int64, device=DEVICE)
    weights = torch.ones(2, 1, device=DEVICE)
    out = fast_moe.experts(x, ids, weights, stack, SITU, None)
    assert off_by(out, moe.experts(x, ids, weights, stack, SITU, None)) < 1e-5


def test_experts_cut_finer_than_their_groups_are_refused() -> None:
    tiling = fast_moe.Tiling(rows=16, width=128, depth=256, stages=3, warps=4)
    with pytest.raises(BackendUnsupported, match="192 x 128; both must be multiples of 128"):
        fast_moe.fitted(tiling, 192, 128)


def test_every_code_and_scale_is_unpacked_exactly() -> None:
    """An identity times the weights: rows of the product are the weights themselves."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(128, 1)[:, :64].contiguous()
    codes[1::2] = torch.arange(64, 128, dtype=torch.uint8)
    codes[2::4] = torch.arange(128, 192, dtype=torch.uint8)
    codes[3::4] = torch.arange(192, 256, dtype=torch.uint8)
    w2 = codes.unsqueeze(0).to(DEVICE)  # [1, 128, 64]: 128 x 128 codes
    scale = torch.arange(1, 129, dtype=torch.uint8).repeat(4).view(1, 128, 4).to(DEVICE)
    assert fast_moe.unsupported(
        moe.ExpertStack(w13=w2, w2=w2, w13_scale=scale, w2_scale=scale)
    ) is None  # fmt: skip
    wanted = quant.unpack_mxfp4(w2[0], scale[0], torch.float32)
    assert fast_quant.unpack(w2[0], scale[0], torch.float32).equal(wanted)


def test_latent_attention_joins_its_parts_and_never_reads_past_a_share() -> None:
    heads, rank, rope, starts = 5, 32, 16, [0, 63, 64, 200]
    pages = randn(12, 2, 64, rank + rope)
    tables, taken = [], 0
    for start in starts:
        owned = list(range(taken, taken + start // 64 + 1))
        pages[owned[-1], :, start % 64 + 1 :] = float("nan")
        tables.append(owned + [-1] * (4 - len(owned)))
        taken += len(owned)
    plan = step_plan(list(range(4)), starts, tables)
    q, kv_b = randn(4, heads, 24 + rope), randn(heads, 24 + 20, rank)
    out = fast_mla.attend_steps(q, pages, 1, kv_b, 0.2, plan, None)
    assert off_by(out, mla.attend_steps(q, pages, 1, kv_b, 0.2, plan, None)) < 1e-5


@pytest.mark.parametrize(
    ("lengths", "starts"), [([130, 7], [0, 64]), ([64, 200], [192, 0])], ids=["odd", "resumed"]
)
def test_causal_attention_over_pages_sees_its_share_and_no_more(
    lengths: list[int], starts: list[int]
) -> None:
    heads, nope, rope, value, rank = 2, 16, 16, 32, 32
    pages = randn(16, 2, 64, rank + rope)
    plan = chunk_plan(lengths, [0, 1])
    tables, taken = [], 0
    for length, start in zip(lengths, starts, strict=True):
        owned = list(range(taken, taken + -(-(start + length) // 64)))
        pages[owned[-1], :, (start + length - 1) % 64 + 1 :] = float("nan")
        tables.append(owned + [-1] * (8 - len(owned)))
        taken += len(owned)
    plan = dataclasses.replace(
        plan,
        starts=torch.tensor(starts, device=DEVICE),
        tables=torch.tensor(tables, device=DEVICE),
    )
    q = randn(len(plan.lengths), 64, heads, nope + rope)
    kv_b = randn(heads, nope + value, rank)
    out = mla_chunk.attend_chunks(q, pages, 1, kv_b, 0.2, plan, None)
    wanted = mla.attend_chunks(q, pages, 1, kv_b, 0.2, plan, None)
    real = torch.arange(64, device=DEVICE) < plan.lengths.unsqueeze(1)
    assert off_by(out[real], wanted[real]) < 1e-5
    assert out.isfinite().all()


@pytest.mark.gpu
def test_causal_attention_of_the_release_equals_its_definition() -> None:
    lengths = [700, 1500]
    plan = chunk_plan(lengths, [0, 1])
    pages = torch.empty(4900, 24, 64, 576, device="cuda", dtype=BF16)
    tables = torch.arange(4850, 4898, device="cuda").view(2, 24)
    pages[4850:, 5] = randn(50, 64, 576, dtype=BF16)
    plan = dataclasses.replace(plan, tables=tables)
    q, kv_b = (
        randn(len(plan.lengths), 64, 96, 192, dtype=BF16),
        randn(96, 256, 512, dtype=BF16) * 0.05,
    )
    out = mla_chunk.attend_chunks(q, pages, 5, kv_b, 192**-0.5, plan, None)
    wanted = mla.attend_chunks(q, pages, 5, kv_b, 192**-0.5, plan, None)
    real = torch.arange(64, device="cuda") < plan.lengths.unsqueeze(1)
    assert off_by(out[real], wanted[real]) < 1.5e-2


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
def test_digests_are_the_same_integers_and_name_what_is_not_finite(dtype: torch.dtype) -> None:
    values = randn(4, 3, 70, 6, dtype=dtype)
    values[2, 1, 3, 3], values[0, 2, 0, 0] = float("nan"), float("inf")
    sums, finite = fast_digest.digest_pages(values, 10**12 + 3)
    sums_wanted, finite_wanted = slow_digest.digest_pages(values, 10**12 + 3)
    assert torch.equal(sums, sums_wanted)
    assert torch.equal(finite, finite_wanted)
    listed = [3, 0, 2]
    wanted = slow_digest.digest_pages(values[listed, :, :40], 7)
    result = fast_digest.digest_listed(values, listed, 40, 7)
    assert all(torch.equal(a, b) for a, b in zip(result, wanted, strict=True))


def test_parts_of_several_shapes_are_added_up_group_by_group() -> None:
    states = randn(2, 5, 3, 8, 4)
    pages = randn(4, 3, 16, 6, dtype=BF16)
    odd = randn(1, 2, 3, 2, dtype=BF16)
    states[1, 4, 2, 7, 3] = float("nan")
    parts = [
        Rows(values=states[1, 1:5][None], at=1, first=96),
        Rows(values=pages, at=5, first=48, pages=(3, 0)),
        Rows(values=pages, at=5, first=144, pages=(2,), tokens=5),
        Rows(values=odd, at=6, first=2**33),
    ]
    totals = torch.zeros(2, 9, dtype=torch.int64, device=DEVICE)
    groups = [parts[2:3], parts[:2], [], parts[3:]]  # an odd number of pages, and none
    adds = fast_digest.plan(groups, *totals, block=64, programs=3)
    for add in reversed(adds):
        add()
    slow = Summing([str(name) for name in range(9)], torch.device("cpu"))
    slow.add([dataclasses.replace(part, values=part.values.cpu()) for part in parts])
    assert torch.equal(totals.cpu()[0], slow._totals[0])
    assert (totals.cpu()[1] != 0).tolist() == (slow._totals[1] != 0).tolist() == [False] * 4 + [
        True, *[False] * 4
    ]  # fmt: skip


@pytest.mark.gpu
def test_digests_reach_pages_and_slots_beyond_two_to_the_32() -> None:
    pages = torch.empty(4900, 24, 64, 576, device="cuda", dtype=BF16)
    listed = [4899, 3, 4898]
    pages[listed] = randn(3, 24, 64, 576, dtype=BF16)
    assert listed[0] * pages.stride(0) > 2**32
    wanted = slow_digest.digest_pages(pages[listed, :, :60], 11)
    result = digest.digest_listed(pages, listed, 60, 11)
    assert all(torch.equal(a, b) for a, b in zip(result, wanted, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [96, 12])
def test_latent_attention_reaches_pages_beyond_two_to_the_32(heads: int) -> None:
    pages = torch.empty(4900, 24, 64, 576, device="cuda", dtype=BF16)
    tables = torch.randint(4850, 4900, (3, 40), device="cuda")
    pages[4850:, 5] = randn(50, 64, 576, dtype=BF16)
    plan = step_plan([0, 1, 2], [2500, 63, 1000], tables.tolist())
    q, kv_b = randn(3, heads, 192, dtype=BF16), randn(heads, 256, 512, dtype=BF16) * 0.05
    out = fast_mla.attend_steps(q, pages, 5, kv_b, 192**-0.5, plan, None)
    assert off_by(out, mla.attend_steps(q, pages, 5, kv_b, 192**-0.5, plan, None)) < 1.5e-2


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 100, 1500])
def test_experts_of_the_release_equal_the_loop_over_them(rows: int) -> None:
    count, inner, width, top = 56, 3072, 3584, 16

    def fill(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8, device="cuda")

    stack = moe.ExpertStack(
        w13=fill(count, 2 * inner, width // 2).random_(0, 256),
        w2=fill(count, width, inner // 2).random_(0, 256),
        w13_scale=fill(count, 2 * inner, width // 32).random_(116, 121),
        w2_scale=fill(count, width, inner // 32).random_(116, 121),
    )
    ids = torch.rand(rows, count, device="cuda").topk(top, -1).indices.sort(-1).values
    x, weights = randn(rows, width, dtype=BF16), torch.rand(rows, top, device="cuda")
    out = fast_moe.experts(x, ids, weights, stack, SITU, None)
    assert off_by(out, moe.experts(x, ids, weights, stack, SITU, None)) < 6e-3


@pytest.mark.gpu
@pytest.mark.parametrize("readable", [1, 4, 8])
def test_residual_reads_of_the_release_equal_their_formula(readable: int) -> None:
    prefix, bank, more = (randn(*s, dtype=BF16) for s in ((700, 7168), (700, 8, 7168), (700, 7168)))
    score, weight = randn(7168) * 0.02, randn(7168, dtype=BF16)
    options = {"eps": 1e-5, "pending": more, "norm": weight}
    out, total = fast_attnres.read(prefix, bank, readable, score, **options)
    wanted, total_wanted = attnres.read(prefix, bank, readable, score, **options)
    assert off_by(out, wanted) < 6e-3
    assert torch.equal(total, total_wanted)
