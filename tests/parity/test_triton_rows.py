"""Products in fixed tiles, page writes and padding: a row is its own, whoever stands beside it."""

# ruff: noqa: I001 - the support module settles how kernels run, so it comes before them.
from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.support.triton_ops import DEVICE, GPU, chunk_plan, off_by, randn, step_plan

from common.ops import mla, paging, rows
from common.ops.mla import triton as fast_mla
from common.ops.moe import triton_route
from common.ops.moe.triton import group
from common.ops.moe.triton_group import group_few
from common.ops.paging import triton as fast_paging
from common.ops.plan import Steps
from common.ops.rows import triton as fast_rows

pytestmark = pytest.mark.filterwarnings(  # of the interpreter: numpy scalars, masked overflows
    "ignore::DeprecationWarning", "ignore::RuntimeWarning"
)
BF16 = torch.bfloat16


@pytest.mark.parametrize("tile", [8, 64], ids=["steps", "chunks"])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (1100, 70)], ids=["even", "parts"])
def test_a_row_of_a_product_has_the_same_bits_alone_and_among_others(
    tile: int, inputs: int, outputs: int
) -> None:
    x, weight = randn(70, inputs + 5)[:, 3:-2], randn(outputs, inputs)
    whole = fast_rows.linear(x, weight, tile)
    assert off_by(whole, rows.linear(x, weight, None)) < 1e-6
    assert torch.equal(fast_rows.linear(x[:9], weight, tile), whole[:9])
    if GPU:  # the interpreter multiplies with numpy, whose bits depend on a row's place
        assert torch.equal(fast_rows.linear(x[9:10], weight, tile), whole[9:10])
        assert torch.equal(fast_rows.linear(x[9:].flip(0), weight, tile), whole[9:].flip(0))
    assert fast_rows.linear(x[:0], weight, tile).shape == (0, outputs)


def test_products_of_heads_take_cut_inputs_and_turned_weights() -> None:
    x, weight = randn(5, 3, 24)[..., :16], randn(3, 40, 16).transpose(1, 2)
    found = fast_rows.heads(x, weight, 8)
    assert off_by(found, rows.heads(x, weight, None)) < 1e-6
    assert torch.equal(fast_rows.heads(x[:2], weight, 8), found[:2])


@pytest.mark.parametrize("tile", [None, 8, 64])
def test_inputs_are_widened_on_the_way_to_fp32_weights(tile: int | None) -> None:
    x, weight = randn(6, 200).bfloat16(), randn(24, 200)
    found = fast_rows.widened(x, weight, tile)
    assert found.dtype == torch.float32
    assert off_by(found, rows.widened(x, weight, None)) < 1e-6


@pytest.mark.parametrize(("count", "outputs"), [(70, 70), (2050, 33)], ids=["few", "many"])
def test_fp32_weights_in_three_parts_lose_no_bit_of_them(count: int, outputs: int) -> None:
    x, weight = randn(count, 192).bfloat16(), randn(outputs, 192) * 0.02
    out = torch.full((count, outputs), float("nan"), device=DEVICE)
    fast_rows.in_parts(x, weight, out)
    wanted = x.double() @ weight.double().t()
    library = off_by(rows.widened(x, weight, None), wanted)
    assert off_by(out, wanted) < 2 * library


def test_the_number_of_parts_follows_from_the_weights_alone() -> None:
    assert fast_rows.parts_of(163840, 7168, 1) == 1
    assert fast_rows.parts_of(3584, 7168, 1) == 4
    assert fast_rows.parts_of(896, 7168, 1) == 16
    assert fast_rows.parts_of(512, 128, 96) == 1


@pytest.mark.parametrize("module", [paging, fast_paging], ids=["definition", "triton"])
def test_padding_writes_no_page(module) -> None:
    pages = randn(6, 2, 64, 20)
    before, latent = pages.clone(), randn(3, 20)
    module.write_steps(
        latent, pages, 1, step_plan([4, -1, 0], [70, -1, 3], [[2, 5], [-1, -1], [1, -1]])
    )
    assert torch.equal(pages[5, 1, 6], latent[0])
    assert torch.equal(pages[1, 1, 3], latent[2])
    pages[5, 1, 6], pages[1, 1, 3] = before[5, 1, 6], before[1, 1, 3]
    assert torch.equal(pages, before)


@pytest.mark.parametrize("module", [mla, fast_mla], ids=["definition", "triton"])
@pytest.mark.parametrize("tile", [None, 8])
def test_attention_of_padding_reads_no_page(module, tile: int | None) -> None:
    pages = randn(4, 1, 64, 48)
    pages[3] = float("nan")
    plan = step_plan([0, -1], [100, -1], [[0, 2], [-1, -1]])
    q, kv_b = randn(2, 3, 32), randn(3, 32, 32)
    found = module.attend_steps(q, pages, 0, kv_b, 0.2, plan, tile)
    assert not found[1].any()
    one = Steps(slots=plan.slots[:1], starts=plan.starts[:1], tables=plan.tables[:1])
    assert off_by(found[:1], mla.attend_steps(q[:1], pages, 0, kv_b, 0.2, one, None)) < 1e-5


def test_a_share_is_divided_by_its_own_length_where_tiles_are_fixed() -> None:
    """Beside a neighbour with a longer table, and alone: the same bits."""
    heads, rank, rope = 2, 16, 16
    pages = randn(60, 1, 64, rank + rope)
    q, kv_b = randn(2, heads, 16 + rope), randn(heads, 32, rank)
    tables = torch.full((2, 50), -1, dtype=torch.int64, device=DEVICE)
    tables[0, :19], tables[1] = torch.arange(19), torch.arange(50) + 5
    both = Steps(
        slots=torch.tensor([0, 1], device=DEVICE),
        starts=torch.tensor([1200, 3100], device=DEVICE),
        tables=tables,
    )
    one = Steps(slots=both.slots[:1], starts=both.starts[:1], tables=tables[:1, :19].contiguous())
    together = fast_mla.attend_steps(q, pages, 0, kv_b, 0.2, both, 8)
    alone = fast_mla.attend_steps(q[:1], pages, 0, kv_b, 0.2, one, 8)
    assert torch.equal(together[:1], alone)
    assert off_by(together, mla.attend_steps(q, pages, 0, kv_b, 0.2, both, None)) < 1e-5


def test_a_row_that_is_no_number_still_chooses_experts_that_exist() -> None:
    logits, bias = randn(3, 24), randn(24) * 0.1
    logits[1] = float("nan")
    ids, weights = triton_route.route(logits, bias, top_k=4)
    assert ids[1].tolist() == [0, 1, 2, 3]
    assert weights[1].isnan().all()
    assert weights[[0, 2]].isfinite().all()


@pytest.mark.parametrize(("rows", "experts", "top"), [(1, 896, 16), (33, 56, 16), (5, 3, 2)])
@pytest.mark.parametrize("height", [16, 64])
def test_choices_are_sorted_and_cut_as_the_library_does(
    rows: int, experts: int, top: int, height: int
) -> None:
    ids = torch.rand(rows, experts, device=DEVICE).topk(top, -1).indices.sort(-1).values
    source, expert, begin, offsets = group(ids, experts, height)
    found = group_few(ids, experts, height)
    assert torch.equal(found[0], source)
    assert torch.equal(found[1], expert)
    assert torch.equal(found[2][expert < experts], begin[expert < experts])
    assert torch.equal(found[3], offsets)


@pytest.mark.gpu
def test_writes_and_attention_in_fixed_parts_reach_pages_beyond_two_to_the_32() -> None:
    pages = torch.empty(4900, 24, 64, 576, device="cuda", dtype=BF16)
    assert 4899 * pages.stride(0) > 2**32
    tables = torch.randint(4850, 4899, (3, 40), device="cuda")
    tables[0, 2500 // 64] = 4899
    pages[4850:, 5] = randn(50, 64, 576, dtype=BF16)
    plan = step_plan([0, 1, 2], [2500, 63, 1000], tables.tolist())
    latent = randn(3, 576, dtype=BF16)
    fast_paging.write_steps(latent, pages, 5, plan)
    assert torch.equal(pages[4899, 5, 2500 % 64], latent[0])
    q, kv_b = randn(3, 96, 192, dtype=BF16), randn(96, 256, 512, dtype=BF16) * 0.05
    out = fast_mla.attend_steps(q, pages, 5, kv_b, 192**-0.5, plan, 8)
    assert off_by(out, mla.attend_steps(q, pages, 5, kv_b, 192**-0.5, plan, None)) < 1.5e-2


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(49376, 7168), (7168, 12288), (896, 7168)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=["bf16", "fp32"])
def test_products_of_the_release_in_fixed_tiles(shape: tuple[int, int], dtype) -> None:
    x, weight = randn(64, shape[1], dtype=dtype), randn(*shape, dtype=dtype) * 0.02
    wanted = x.double() @ weight.double().t()
    whole = fast_rows.linear(x, weight, 8)
    assert off_by(whole, wanted) < (4e-3 if dtype == BF16 else 3e-6)
    for some in ([0], [63], [5, 17, 40], list(range(63, -1, -1))):
        assert torch.equal(fast_rows.linear(x[some], weight, 8), whole[some])
    assert off_by(fast_rows.linear(x, weight, 64), wanted) < (4e-3 if dtype == BF16 else 3e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 64, 256, 2000])
def test_the_routers_logits_are_fp32s(count: int) -> None:
    x, weight = randn(count, 7168, dtype=BF16), randn(896, 7168) * 0.02
    wanted = x.double() @ weight.double().t()
    library = off_by(torch.nn.functional.linear(x.float(), weight), wanted)
    assert off_by(fast_rows.widened(x, weight, None), wanted) < max(2 * library, 2e-6)
    assert off_by(fast_rows.widened(x, weight, 8), wanted) < max(2 * library, 2e-6)


@pytest.mark.parametrize("module", [paging, fast_paging], ids=["definition", "triton"])
def test_chunks_are_written_to_the_pages_of_their_shares(module) -> None:
    pages = randn(9, 2, 64, 20)
    before = pages.clone()
    plan = dataclasses.replace(
        chunk_plan([70, 3, 128], [0, 1, 2]),
        starts=torch.tensor([64, 0, 128], device=DEVICE),
        tables=torch.tensor([[8, 2, 0, -1], [4, -1, -1, -1], [8, 8, 3, 6]], device=DEVICE),
    )
    latent = randn(5, 64, 20)
    module.write_chunks(latent, pages, 1, plan)
    assert torch.equal(pages[2, 1], latent[0])
    assert torch.equal(pages[0, 1, :6], latent[1, :6])
    assert torch.equal(pages[4, 1, :3], latent[2, :3])
    assert torch.equal(pages[[3, 6], 1], latent[3:])
    for page, count in ((2, 64), (0, 6), (4, 3), (3, 64), (6, 64)):
        pages[page, 1, :count] = before[page, 1, :count]
    assert torch.equal(pages, before)
