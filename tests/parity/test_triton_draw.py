"""Sampling's kernels against the sampler's torch definition."""

# ruff: noqa: I001 - the support module settles how kernels run, so it comes before them.
from __future__ import annotations

import pytest
import torch

from tests.support.triton_ops import DEVICE, GPU

from common.contract.messages import Sampling, TokenOut
from common.ops.draw import triton as kernels
from common.ops.draw import triton_filter, triton_select
from common.sampling import device, history, noise, sampler
from common.sampling.masks import Line
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


FILTERS = [
    Sampling(top_k=3),
    Sampling(top_k=90, temperature=3.0),
    Sampling(top_p=0.3),
    Sampling(top_p=0.97, temperature=40.0),
    Sampling(top_p=0.999999),
    Sampling(top_k=60, top_p=0.6, temperature=2.0),
    Sampling(top_k=7, top_p=0.99, min_p=0.05),
    Sampling(top_p=0.0001),
]


@pytest.mark.parametrize(
    "room",
    [(1 << 14, 1 << 12), (8, 1 << 12), (8, 8)],
    ids=["listed", "many are kept", "many may be kept"],
)
@pytest.mark.parametrize("values", ["wide", "of few values", "all equal", "around zero"])
def test_filters_leave_what_the_definition_leaves(
    room: tuple[int, int], values: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if GPU and room[0] == 8:
        pytest.skip("the lists' lengths are constants of the compiled kernels")
    for name, words in zip(("SURE", "OPEN"), room, strict=True):
        monkeypatch.setattr(kernels, name, words)
        for module in (triton_filter, triton_select):
            monkeypatch.setattr(module, f"_{name}", triton_filter.tl.constexpr(words))
    vocab = 200 if not GPU else 40_000
    kind = {"wide": 3.0, "of few values": 1.0, "all equal": 0.0, "around zero": 1e-4}[values]
    logits = kind * torch.randn(len(FILTERS), vocab, device=DEVICE)
    if values == "of few values":
        logits = logits.round_()
    for position in range(3 if GPU else 1):
        check(logits, [Row(sampling=s, position=position) for s in FILTERS])


def adjusted(values: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    """The logits that the choice is made from, but for masks."""
    enqueue = device.prepared(values, rows)
    (logits, table, _), facts = enqueue.args, enqueue.keywords
    saved = torch.empty(facts["entries"], device=DEVICE)
    grid, given = (len(rows), -(-facts["longest"] // 256)), (logits, logits.stride(0), table, saved)
    kind = {"BLOCK": 256, "enable_fp_fusion": False}
    kernels.adjust_kernel[grid](*given, values.shape[1], RESTORE=False, **kind)
    found = logits.clone()
    kernels.adjust_kernel[grid](*given, values.shape[1], RESTORE=True, **kind)
    assert torch.equal(logits, values)
    return found


@pytest.mark.parametrize("most", [history.MOST_KEPT, 8], ids=["kept", "sent each step"])
def test_a_growing_history_changes_logits_as_the_definition_does(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "MOST_KEPT", most)
    vocab, generator = 97, torch.Generator().manual_seed(5)
    kinds = [
        Sampling(presence=0.3, frequency=0.7),
        Sampling(repetition=1.3, logit_bias={3: -2.5, 50: 1.25, 1 << 40: 1.0}),
        Sampling(presence=-0.2, repetition=0.9, min_tokens=30, stop_ids=(0, 3, 96)),
        Sampling(min_tokens=4, stop_ids=(5,)),
        Sampling(),
    ]
    prompt = (3, 4, 50, vocab + 2)
    told = [7, 7, 9]  # a replay's
    begun = [history.History(s, prompt=prompt, tokens=told) for s in kinds]
    for position in range(len(told), 60):
        values = 3 * torch.randn(len(kinds), vocab, generator=generator).to(DEVICE)
        rows = [
            Row(sampling=s, position=position, counts=h.counts, prompt=h.prompt, history=h)
            for s, h in zip(kinds, begun, strict=True)
        ]
        expected = values.cpu().clone()
        for row, line in zip(rows, expected, strict=True):
            sampler._adjust(line, row)
        taken = rows[1:] if position % 9 == 0 else rows  # a row may wait: its client is slow
        found = adjusted(values[-len(taken) :].contiguous(), taken).cpu()
        assert torch.equal(found, expected[-len(taken) :])
        for row in taken:
            token = int(torch.randint(0, vocab, (), generator=generator))
            assert row.history is not None
            row.history.take(token)


def test_masks_of_one_block_go_over_as_they_are() -> None:
    block = torch.tensor([[0b101, 0, 0, 0], [0, 0, 0, 0], [0, 0b10, 0, 0]], dtype=torch.uint8)
    logits = torch.arange(20.0, device=DEVICE).expand(4, -1).contiguous()
    masks = [Line(block, 2), None, Line(block, 0), b"\x01"]
    for some in (masks, masks[:3]):
        rows = [Row(sampling=Sampling(temperature=0), mask=mask) for mask in some]
        outcomes = device.launch(logits[: len(some)], rows).result()
        assert [outcome.token.id for outcome in outcomes] == [9, 19, 2, 0][: len(some)]
        assert [token.id for token in sample(logits[: len(some)].cpu(), rows)] == [9, 19, 2, 0][
            : len(some)
        ]


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
