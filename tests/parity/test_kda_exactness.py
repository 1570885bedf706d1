"""Chunked KDA against the recurrence in float64: largest error over largest value."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.ops import kda
from common.ops.plan import Chunks, Steps


@dataclass(frozen=True)
class Case:
    """One request: q, k, g [T, H, K], v [T, H, V], beta [T, H], state [H, V, K]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor


def make(length: int, gates: str, keys: str, carried: bool, seed: int, dim: int = 64) -> Case:
    draw = torch.Generator().manual_seed(seed)
    shape = (length, 2, dim)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=draw)

    uniform = torch.rand(shape, generator=draw)
    k = normal(*shape)
    if keys == "parallel":  # all within about a hundredth of one direction
        k = normal(1, 2, dim) + 0.01 * k
    g = {
        "bound": lambda: torch.full(shape, -5.0),
        "near bound": lambda: -5.0 + 1e-3 * uniform,
        "zero": lambda: -1e-6 * uniform,
        "small": lambda: -0.05 * uniform,
        "mixed": lambda: -5.0 * torch.sigmoid(4.0 * normal(*shape)),
        "half and half": lambda: torch.where(uniform > 0.5, -5.0, -1e-5),
        "steps": lambda: (
            torch.where(torch.arange(length) % 16 == 0, -1e-3, -5.0).view(-1, 1, 1).expand(shape)
        ),
        "softplus": lambda: -8.0 * uniform.exp() * (uniform > 0.3),
    }[gates]()
    return Case(
        q=normal(*shape),
        k=k,
        v=normal(*shape),
        g=g.contiguous(),
        beta=torch.sigmoid(3.0 * normal(length, 2)),
        state=normal(2, dim, dim) if carried else torch.zeros(2, dim, dim),
    )


def truth(case: Case) -> tuple[Tensor, Tensor]:
    """The recurrence in float64, written out."""
    q, k, v, g, beta, s = (
        x.double() for x in (case.q, case.k, case.v, case.g, case.beta, case.state)
    )
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    out = []
    for t in range(len(q)):
        s = s * g[t].exp()[:, None, :]
        error = v[t] - (s * k[t][:, None, :]).sum(-1)
        s = s + (beta[t][:, None] * error)[:, :, None] * k[t][:, None, :]
        out.append((s * q[t][:, None, :]).sum(-1))
    return torch.stack(out), s


def chunked(case: Case, passes: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    """The op over the grid, in passes of so many chunks; rows of padding hold junk."""
    length = len(case.q)
    state = torch.full((2, 3, *case.state.shape), torch.nan)
    state[1, 2] = case.state
    count = -(-length // 64)
    cuts = [*passes, count - sum(passes)] if sum(passes) < count else list(passes)
    out, at = [], 0
    for size in cuts:
        rows = slice(at * 64, (at + size) * 64)
        lengths = [min(64, length - 64 * (at + i)) for i in range(size)]
        plan = Chunks(
            slots=torch.tensor([1]),
            first=torch.tensor([0, size]),
            starts=torch.tensor([at * 64]),
            lengths=torch.tensor(lengths),
            tables=torch.zeros(1, count, dtype=torch.long),
        )
        inputs = [
            torch.cat([x[rows], x.new_full((64 * size - sum(lengths), *x.shape[1:]), 0.9)])
            for x in (case.q, case.k, case.v, case.g, case.beta)
        ]
        o = kda.chunks(*(x.unflatten(0, (-1, 64)) for x in inputs), state, 2, plan)
        out.append(o.flatten(0, 1)[: sum(lengths)])
        at += size
    return torch.cat(out), state[1, 2]


def stepped(case: Case) -> tuple[Tensor, Tensor]:
    """The step op, token by token: the recurrence in fp32."""
    state, out = case.state.clone()[None, None], []
    for t in range(len(case.q)):
        plan = Steps(slots=torch.tensor([0]), starts=torch.tensor([t]), tables=torch.tensor([[0]]))
        rows = (x[t : t + 1] for x in (case.q, case.k, case.v, case.g, case.beta))
        out.append(kda.steps(*rows, state, 0, plan)[0])
    return torch.stack(out), state[0, 0]


def errors(ours: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> list[float]:
    """Of outputs and of the state."""
    return [
        float((a.double() - b).abs().max() / b.abs().max().clamp_min(1e-30))
        for a, b in zip(ours, exact, strict=True)
    ]


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("gates", ["bound", "near bound"])
def test_at_the_bound_three_hundred_tokens_stay_within_a_millionth(gates, carried) -> None:
    case = make(300, gates, "random", carried, seed=1)
    assert max(errors(chunked(case), truth(case))) <= 1e-6


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 200])
@pytest.mark.parametrize(
    ("gates", "keys"),
    [
        ("mixed", "random"),
        ("mixed", "parallel"),
        ("zero", "random"),
        ("zero", "parallel"),
        ("small", "parallel"),
        ("half and half", "random"),
        ("steps", "parallel"),
        ("softplus", "random"),
    ],
)
def test_elsewhere_the_error_is_small_and_near_the_recurrences_own(gates, keys, length) -> None:
    for carried in (False, True):
        case = make(length, gates, keys, carried, seed=length)
        exact = truth(case)
        own = errors(stepped(case), exact)
        for error, floor in zip(errors(chunked(case), exact), own, strict=True):
            assert error <= 5e-6
            assert error <= 10 * max(floor, 2**-24)  # half a unit in the last place of fp32


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    length=st.integers(1, 200),
    gates=st.sampled_from(["bound", "mixed", "zero", "half and half", "softplus"]),
    keys=st.sampled_from(["random", "parallel"]),
    seed=st.integers(0, 10**6),
    dim=st.sampled_from([16, 32, 128]),
)
def test_any_request_is_exact_to_five_millionths(length, gates, keys, seed, dim) -> None:
    case = make(length, gates, keys, True, seed, dim)
    assert max(errors(chunked(case), truth(case))) <= 5e-6


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    length=st.integers(65, 260),
    cuts=st.lists(st.integers(1, 2), min_size=1, max_size=2),
    seed=st.integers(0, 99),
)
def test_passes_over_whole_chunks_change_no_bit(length, cuts, seed) -> None:
    case = make(length, "mixed", "random", True, seed)
    whole, divided = chunked(case), chunked(case, tuple(cuts[: -(-length // 64) - 1]))
    assert torch.equal(whole[0], divided[0]) and torch.equal(whole[1], divided[1])


@settings(max_examples=15, deadline=None, derandomize=True)
@given(length=st.integers(1, 150), more=st.integers(1, 70), seed=st.integers(0, 99))
def test_later_tokens_change_no_bit_of_earlier_outputs(length, more, seed) -> None:
    case = make(length + more, "mixed", "random", True, seed)
    short = Case(
        *(x[:length] for x in (case.q, case.k, case.v, case.g, case.beta)), state=case.state
    )
    assert torch.equal(chunked(case)[0][:length], chunked(short)[0])
