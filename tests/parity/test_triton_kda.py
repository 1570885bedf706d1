"""KDA's Triton bodies against the definitions, whose own golden results are tested elsewhere."""

# ruff: noqa: I001 - the support module settles how kernels run, so it comes before them.
from __future__ import annotations

import pytest
import torch

from tests.support.triton_ops import chunk_plan, nan_like, off_by, randn, step_plan

from common.ops import conv, kda, norm
from common.ops.kda import Mixer, triton_chunk, triton_step
from common.ops.kda import triton as mixer
from common.ops.plan import Chunks, Steps

pytestmark = pytest.mark.filterwarnings(  # of the interpreter: numpy scalars, masked overflows
    "ignore::DeprecationWarning", "ignore::RuntimeWarning"
)
BF16 = torch.bfloat16


def layer(heads: int, dim: int) -> Mixer:
    """A layer's parameters with gates over the whole of their range."""
    return Mixer(
        conv=randn(4, 3, heads, dim),
        rate=randn(heads).abs() + 0.5,
        bias=randn(heads, dim),
        lower_bound=-5.0,
        norm=randn(dim),
        eps=1e-5,
    )


def by_parts(
    rows: tuple[torch.Tensor, ...], parts: Mixer, state: torch.Tensor, window: torch.Tensor,
    plan: Chunks | Steps,
) -> torch.Tensor:  # fmt: skip
    """The definition: one op after another, on layer 1 of the pools."""
    raw, forget, strength, opening = rows
    g = kda.gate(forget, parts.rate, parts.bias, parts.lower_bound)
    beta = strength.float().sigmoid()
    if isinstance(plan, Steps):
        q, k, v = conv.conv_steps(raw, parts.conv, window, 1, plan).unbind(1)
        out = kda.steps(q, k, v, g, beta, state, 1, plan)
    else:
        raw, g, beta = (x.unflatten(0, (-1, 64)) for x in (raw, g, beta))
        q, k, v = conv.conv_chunks(raw, parts.conv, window, 1, plan).unbind(2)
        out = kda.chunks(q, k, v, g, beta, state, 1, plan).flatten(0, 1)
    return norm.gated_rms_norm(out, opening, parts.norm, parts.eps)


def inputs(rows: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Rows cut out of one wider tensor, as a stacked projection leaves them."""
    wide = randn(rows, 5 * heads * dim + heads, dtype=dtype)
    inner = heads * dim
    raw, forget, opening, strength = wide.split([3 * inner, inner, inner, heads], -1)
    return (
        raw.unflatten(-1, (3, heads, dim)),
        forget.unflatten(-1, (heads, dim)),
        strength,
        opening.unflatten(-1, (heads, dim)),
    )


@pytest.mark.parametrize("lengths", [[1], [33, 2, 64, 65], [130, 31]], ids=str)
def test_a_pass_over_chunks_equals_its_parts(lengths: list[int]) -> None:
    heads, dim = 2, 32
    slots = [3, 0, 4, 1][: len(lengths)]
    plan = chunk_plan(lengths, slots)
    rows = inputs(64 * len(plan.lengths), heads, dim, torch.float32)
    parts = layer(heads, dim)
    state, window = randn(5, 2, heads, dim, dim), randn(5, 2, heads, 3, 3, dim)
    state_wanted, window_wanted = state.clone(), window.clone()
    wanted = by_parts(rows, parts, state_wanted, window_wanted, plan)

    out = mixer.mix(*rows, parts, state, window, 1, plan)

    real = (torch.arange(64, device=out.device) < plan.lengths.unsqueeze(1)).flatten()
    assert off_by(out[real], wanted[real]) < 1e-5
    assert out.isfinite().all()
    assert off_by(state, state_wanted) < 1e-6
    assert torch.equal(window, window_wanted)


def test_the_chunked_body_takes_a_log_decay_as_it_is() -> None:
    plan = chunk_plan([100], [1])
    q, k, v = randn(2, 64, 3, 2, 32).unbind(2)
    g, beta = -5 * torch.rand_like(q), torch.rand_like(q[..., 0])
    state = randn(2, 1, 2, 32, 32)
    state_wanted = state.clone()
    wanted = kda.chunks(q, k, v, g, beta, state_wanted, 0, plan).flatten(0, 1)[:100]

    out = triton_chunk.chunks(q, k, v, g, beta, state, 0, plan).flatten(0, 1)[:100]

    assert off_by(out, wanted) < 1e-5
    assert off_by(state, state_wanted) < 1e-6


@pytest.mark.parametrize("warps", [4, 8, 16])
def test_a_step_equals_its_parts_and_leaves_padding_alone(warps: int) -> None:
    heads, dim = 3, 32
    given, parts = inputs(3, heads, dim, torch.float32), layer(heads, dim)
    state, window = randn(5, 2, heads, dim, dim), randn(5, 2, heads, 3, 3, dim)
    state_wanted, window_wanted = state.clone(), window.clone()
    plan = step_plan([3, 1], [0, 0], [[0], [0]])
    real = tuple(x[::2] for x in given)
    wanted = by_parts(real, parts, state_wanted, window_wanted, plan)
    out = nan_like(3, heads, dim)

    raw, forget, strength, opening = given
    triton_step.launch(
        raw, parts.conv, forget, parts.rate, parts.bias, -5.0, strength, opening, parts.norm, 1e-5,
        state[:, 1], window[:, 1], torch.tensor([3, -1, 1], device=out.device), out, warps=warps,
    )  # fmt: skip

    assert off_by(out[::2], wanted) < 1e-5
    assert not out[1].any()
    assert off_by(state, state_wanted) < 1e-6
    assert torch.equal(window, window_wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 64])
def test_a_step_of_the_release_reaches_slots_beyond_two_to_the_32(batch: int) -> None:
    heads, dim, layers, slots = 96, 128, 69, 44
    slot_elements = layers * heads * dim * dim
    assert (slots - 1) * slot_elements > 2**32
    state = torch.empty(slots, layers, heads, dim, dim, device="cuda")
    window = torch.zeros(slots, layers, heads, 3, 3, dim, device="cuda", dtype=BF16)
    used = [slots - 1 - i for i in range(min(batch, 4))]
    state[used, 1] = randn(len(used), heads, dim, dim)
    plan = step_plan(used, [0] * len(used), [[0]] * len(used))
    rows, parts = inputs(len(used), heads, dim, BF16), layer(heads, dim)
    few, few_window = state[used][:, :2].clone(), window[used][:, :2].clone()
    places = step_plan(list(range(len(used))), [0] * len(used), [[0]] * len(used))
    wanted = by_parts(rows, parts, few, few_window, places)

    for warps in (4, 8, 16):
        before = state[used, 1].clone()
        raw, forget, strength, opening = rows
        out = nan_like(len(used), heads, dim, dtype=BF16)
        taps = window[used, 1].clone()
        triton_step.launch(
            raw, parts.conv, forget, parts.rate, parts.bias, -5.0, strength, opening, parts.norm,
            1e-5, state[:, 1], window[:, 1], plan.slots, out, warps=warps,
        )  # fmt: skip
        assert off_by(out, wanted) < 6e-3
        assert off_by(state[used, 1], few[:, 1]) < 1e-4
        assert torch.equal(window[used, 1], few_window[:, 1])
        state[used, 1], window[used, 1] = before, taps


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [96, 12])
def test_chunks_of_the_release_equal_their_parts(heads: int) -> None:
    dim, lengths, slots = 128, [1000, 63, 2048], [43, 0, 42]
    plan = chunk_plan(lengths, slots)
    rows, parts = inputs(64 * len(plan.lengths), heads, dim, BF16), layer(heads, dim)
    state = torch.empty(44, 69, heads, dim, dim, device="cuda")
    window = torch.zeros(44, 69, heads, 3, 3, dim, device="cuda", dtype=BF16)
    state[slots, 1] = randn(3, heads, dim, dim) * 0.3
    few, few_window = state[slots][:, :2].clone(), window[slots][:, :2].clone()
    wanted = by_parts(rows, parts, few, few_window, chunk_plan(lengths, [0, 1, 2]))

    out = mixer.mix(*rows, parts, state, window, 1, plan)

    real = (torch.arange(64, device="cuda") < plan.lengths.unsqueeze(1)).flatten()
    assert off_by(out[real], wanted[real]) < 1.2e-2
    assert out.isfinite().all()
    assert off_by(state[slots, 1], few[:, 1]) < 1.2e-2
    assert torch.equal(window[slots, 1], few_window[:, 1])
