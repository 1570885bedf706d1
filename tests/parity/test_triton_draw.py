"""Sampling's kernels against the sampler's torch definition."""

# ruff: noqa: I001 - the support module settles how kernels run, so it comes before them.
from __future__ import annotations

import pytest
import torch

from tests.support.triton_ops import DEVICE

from common.contract.messages import Sampling, TokenOut
from common.sampling import device, noise
from common.sampling.rows import Row
from common.sampling.sampler import sample

pytestmark = pytest.mark.filterwarnings(  # of the interpreter: numpy scalars, masked overflows
    "ignore::DeprecationWarning", "ignore::RuntimeWarning"
)


def batch(vocab: int) -> list[Row]:
    """Rows of every kind; masks as bytes, one of them too short."""
    kinds = [
        Sampling(temperature=0),
        Sampling(temperature=0, logprobs=5, frequency=0.5, repetition=1.3),
        Sampling(seed=1, logprobs=3),
        Sampling(seed=2, temperature=0.7, top_p=0.8, logprobs=0),
        Sampling(seed=-3, top_k=5),
        Sampling(seed=4, min_p=0.1, presence=0.3, logprobs=20),
        Sampling(seed=5, top_k=40, top_p=0.95, min_p=0.01, repetition=1.2),
        Sampling(seed=6, min_tokens=9, stop_ids=(1, 2, vocab - 1), logit_bias={7: 2.5, 1: 9.0}),
        Sampling(seed=7, script=(0,) * 10, logprobs=1),
        Sampling(seed=1 << 70, top_p=0.9),
        Sampling(seed=9, top_p=0.5, top_k=vocab + 5),
        Sampling(seed=10, temperature=2.0, top_p=0.9999),
        Sampling(seed=11, top_k=1),
    ]
    masks = {1: b"\xb5" * (vocab // 8 + 1), 9: b"\x6e" * (vocab // 16), 10: b"\x03"}
    return [
        Row(
            sampling=s, position=i, choice=i % 3, counts={1: 2, 5: 1, vocab + 9: 4}, prompt=(3, 4),
            mask=masks.get(i),
        )
        for i, s in enumerate(kinds)
    ]  # fmt: skip


def check(values: torch.Tensor, rows: list[Row]) -> None:
    before = values.clone()
    outcomes = device.launch(values, rows).result()
    assert torch.equal(values, before)
    for outcome, wanted in zip(outcomes, sample(values.cpu(), rows), strict=True):
        assert isinstance(wanted, TokenOut)
        assert not outcome.bad and not outcome.is_stuck
        assert outcome.token.id == wanted.id
        assert [i for i, _ in outcome.token.top] == [i for i, _ in wanted.top]
        if wanted.logprob is None:
            assert outcome.token.logprob is None
        else:
            assert outcome.token.logprob == pytest.approx(wanted.logprob, abs=4e-6)
        values_of = [value for _, value in outcome.token.top]
        assert values_of == pytest.approx([value for _, value in wanted.top], abs=4e-6)


@pytest.mark.parametrize(
    ("vocab", "kind"), [(31, "wide"), (31, "of few values"), (2049, "of few values")]
)
def test_rows_of_every_kind_get_the_definitions_tokens(vocab: int, kind: str) -> None:
    values = 3 * torch.randn(13, vocab, device=DEVICE)
    if kind == "of few values":  # logits from bf16 are equal often: ids must tell them apart
        values = values.mul_(0.7).round_().mul_(-0.5)
    check(values, batch(vocab))


def test_a_mask_without_tokens_and_bad_logits_are_told() -> None:
    values = torch.randn(3, 40, device=DEVICE)
    values[1, 3], values[1, 9] = float("nan"), float("-inf")
    rows = [Row(sampling=Sampling(top_p=0.5), mask=mask) for mask in (b"\0", None, None)]
    first, second, third = device.launch(values, rows).result()
    assert first.is_stuck and not first.bad
    assert second.bad == 2
    assert not third.bad and not third.is_stuck


def test_rows_that_share_their_logits_are_adjusted_apart() -> None:
    values = torch.zeros(1, 50, device=DEVICE).expand(2, -1)
    kinds = [Sampling(temperature=0, logit_bias={i: 1.0}) for i in (7, 9)]
    outcomes = device.launch(values, [Row(sampling=s) for s in kinds]).result()
    assert [outcome.token.id for outcome in outcomes] == [7, 9]


def test_many_keys_are_the_keys_of_each() -> None:
    fields = [(5, 0, 0), (-1, 2, 77), (1 << 65, 1, 3), ((1 << 64) - 1, 0, 1 << 40)]
    alone = [noise.row_key(seed=s, choice=c, position=p) for s, c, p in fields]
    assert noise.row_keys(*map(list, zip(*fields, strict=True))).tolist() == alone
