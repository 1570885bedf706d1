"""Sampling: what each parameter does, whom a row depends on (nobody), and what bad logits cause."""

import math

import pytest
import torch

from common.contract.messages import Sampling, TokenOut
from common.errors import PoisonedState
from common.sampling.sampler import Row, sample

# Upper 0.1 % points of the chi-square distribution by degrees of freedom.
CRITICAL = {1: 10.83, 2: 13.82, 4: 18.47, 9: 27.88, 19: 43.82}


def logits(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def token(result: TokenOut | PoisonedState) -> TokenOut:
    assert isinstance(result, TokenOut), result
    return result


def one(row_logits: list[float], **fields) -> TokenOut:
    """Sample one row; names of `Row` go to the row, the others to `Sampling`."""
    row = {
        name: fields.pop(name)
        for name in ("choice", "position", "counts", "prompt")
        if name in fields
    }
    return token(sample(logits(row_logits), [Row(sampling=Sampling(**fields), **row)])[0])


def draws(row_logits: list[float], count: int, **fields) -> torch.Tensor:
    """How often each id came up over `count` positions."""
    rows = [Row(sampling=Sampling(**fields), position=p) for p in range(count)]
    results = sample(logits(row_logits).expand(count, -1).contiguous(), rows)
    return torch.bincount(torch.tensor([token(r).id for r in results]), minlength=len(row_logits))


def chi_square(seen: torch.Tensor, weights: torch.Tensor) -> float:
    expected = weights / weights.sum() * seen.sum()
    possible = expected > 0
    assert seen[~possible].sum() == 0
    return ((seen - expected)[possible] ** 2 / expected[possible]).sum().item()


# --- distribution -------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_at_the_temperature(temperature: float) -> None:
    row = [0.1 * i for i in range(20)]
    seen = draws(row, 2500, temperature=temperature, seed=7)
    assert chi_square(seen, (torch.tensor(row) / temperature).exp()) < CRITICAL[19]


def test_choices_of_one_request_are_independent() -> None:
    row = [0.0, 0.5]
    pairs = torch.zeros(4)
    for position in range(1500):
        both = [Row(sampling=Sampling(seed=3, n=2), choice=c, position=position) for c in (0, 1)]
        first, second = (token(r).id for r in sample(logits(row, row), both))
        pairs[2 * first + second] += 1
    p = torch.tensor(row).softmax(0)
    assert chi_square(pairs, torch.outer(p, p).flatten()) < CRITICAL[4]


def test_top_k_keeps_exactly_k_and_of_equals_the_lowest_ids() -> None:
    seen = draws([1.0, 2.0, 1.0, 1.0, 0.0], 2000, top_k=3)
    weights = torch.tensor([1.0, math.e, 1.0, 0, 0])
    assert chi_square(seen, weights) < CRITICAL[2]


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.0001, 1), (0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.99, 4), (0.999, 5), (1.0, 5)],
)
def test_top_p_keeps_the_fewest_ids_that_reach_it(top_p: float, kept: int) -> None:
    probabilities = torch.tensor([0.1, 0.4, 0.195, 0.3, 0.005])
    seen = draws(probabilities.log().tolist(), 1200, top_p=top_p)
    best = probabilities.argsort(descending=True)[:kept]
    assert sorted(seen.nonzero()[:, 0].tolist()) == sorted(best.tolist())


def test_top_p_looks_at_what_top_k_left() -> None:
    # Of (0.5, 0.3) the first has a share of 0.625: 0.6 keeps one, although 0.5 alone is below it.
    seen = draws(torch.tensor([0.5, 0.3, 0.2]).log().tolist(), 300, top_k=2, top_p=0.6)
    assert seen.tolist() == [300, 0, 0]


def test_min_p_is_relative_to_the_best_after_the_temperature() -> None:
    row = torch.tensor([0.6, 0.25, 0.15]).log().tolist()
    assert draws(row, 400, min_p=0.3)[2] == 0
    assert draws(row, 400, min_p=0.2)[2] > 0
    assert draws(row, 400, min_p=0.3, temperature=2.0)[2] > 0  # (0.15 / 0.6) ** 0.5 is 0.5


# --- greedy, bias and penalties -----------------------------------------------------------------


@pytest.mark.parametrize("extra", [{}, {"logprobs": 0}, {"logit_bias": {0: -1.0}}])
def test_temperature_zero_takes_the_lowest_of_the_best_ids(extra: dict) -> None:
    assert one([0.0, 2.0, 2.0, 1.0], temperature=0, **extra).id == 1


def test_logit_bias_is_added_and_ids_outside_the_vocabulary_do_nothing() -> None:
    assert one([1.0, 0.0], temperature=0, logit_bias={1: 1.5, 2: 100.0, -1: 100.0}).id == 1


def test_stop_ids_are_masked_until_the_minimum_was_emitted() -> None:
    at = [
        one([9.0, 8.0, 0.0], temperature=0, min_tokens=2, stop_ids=(0, 1), position=p).id
        for p in (0, 1, 2)
    ]
    assert at == [2, 2, 0]


def test_presence_counts_once_and_frequency_every_time() -> None:
    row = [3.0, 1.5, 0.0]
    assert one(row, temperature=0, presence=1.6, counts={0: 5}).id == 1
    assert one(row, temperature=0, presence=1.4, counts={0: 5}).id == 0
    assert one(row, temperature=0, frequency=0.4, counts={0: 5}).id == 1
    assert one(row, temperature=0, frequency=0.4, counts={0: 3}).id == 0
    assert one(row, temperature=0, presence=1.6, frequency=1.0).id == 0


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_seen_ids() -> None:
    assert one([3.0, 2.0], temperature=0, repetition=2.0, prompt=(0,)).id == 1
    assert one([3.0, 2.0], temperature=0, repetition=2.0, counts={0: 1}).id == 1
    assert one([-1.0, -1.5], temperature=0, repetition=2.0, prompt=(0,)).id == 1
    assert one([3.0, 2.0], temperature=0, repetition=2.0, prompt=(0, 1)).id == 0
    assert one([3.0, 2.0], temperature=0, repetition=2.0, prompt=(0,), counts={0: 2}).id == 1


# --- log-probabilities --------------------------------------------------------------------------


def test_log_probabilities_are_of_the_raw_logits() -> None:
    row = [0.0, 1.0, 2.0, 3.0]
    result = one(row, temperature=0.1, top_k=1, logit_bias={0: 100.0}, logprobs=2)
    raw = torch.tensor(row).log_softmax(0).tolist()
    assert result.id == 0
    assert result.logprob == raw[0]
    assert result.top == ((3, raw[3]), (2, raw[2]))


def test_equal_log_probabilities_are_listed_by_id_and_cut_at_the_vocabulary() -> None:
    assert [i for i, _ in one([1.0, 2.0, 1.0, 2.0, 1.0], temperature=0, logprobs=3).top] == [
        1,
        3,
        0,
    ]
    assert len(one([1.0, 2.0], temperature=0, logprobs=20).top) == 2


def test_without_logprobs_only_the_id_is_reported() -> None:
    assert one([0.0, 1.0], temperature=0) == TokenOut(id=1)


# --- script -------------------------------------------------------------------------------------


def test_script_replaces_the_choice_and_only_while_it_lasts() -> None:
    row = [5.0, 0.0, 1.0]
    found = [one(row, temperature=0, script=(2, 1), position=p, logprobs=0) for p in range(3)]
    assert [t.id for t in found] == [2, 1, 0]
    raw = torch.tensor(row).log_softmax(0).tolist()
    assert [t.logprob for t in found] == [raw[2], raw[1], raw[0]]


# --- rows do not know each other ----------------------------------------------------------------


def mixed_rows(vocab: int) -> list[Row]:
    """Rows of every kind, so that each meets each in a batch."""
    kinds = [
        Sampling(temperature=0),
        Sampling(temperature=0, logprobs=5, frequency=0.5),
        Sampling(seed=1, logprobs=3),
        Sampling(seed=2, temperature=0.7, top_p=0.8, logprobs=0),
        Sampling(seed=3, top_k=5),
        Sampling(seed=4, min_p=0.1, presence=0.3, logprobs=20),
        Sampling(seed=5, top_k=40, top_p=0.95, min_p=0.01, repetition=1.2),
        Sampling(seed=6, min_tokens=9, stop_ids=(1, 2, vocab - 1)),
        Sampling(seed=7, script=(0,) * 8),
        Sampling(seed=8, top_p=0.9),
    ]
    masks = {1: 0b1011_0101, 9: 0b0110_1110}
    return [
        Row(
            sampling=s,
            position=i,
            counts={1: 2, 5: 1},
            prompt=(3, 4),
            mask=bytes([masks[i]] * (vocab // 8 + 1)) if i in masks else None,
        )
        for i, s in enumerate(kinds)
    ]


def check_rows_alone_and_together(vocab: int, device: str) -> None:
    rows = mixed_rows(vocab)
    values = (
        torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(vocab))
        .mul_(3)
        .to(device)
    )
    values[4] = float("nan")
    alone = [sample(values[i : i + 1].clone(), [row])[0] for i, row in enumerate(rows)]
    for order in (
        list(range(len(rows))),
        list(reversed(range(len(rows)))),
        [8, 3, 4, 1],
        [0, 5, 9],
    ):
        together = sample(values[order], [rows[i] for i in order])
        assert [repr(t) for t in together] == [repr(alone[i]) for i in order]


@pytest.mark.parametrize("vocab", [31, 257, 1536])
def test_result_is_bit_equal_alone_and_in_any_batch(vocab: int) -> None:
    check_rows_alone_and_together(vocab, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [1536, 163840])
def test_result_is_bit_equal_alone_and_in_any_batch_on_a_gpu(vocab: int) -> None:
    check_rows_alone_and_together(vocab, "cuda")


@pytest.mark.gpu
def test_both_devices_draw_the_same_tokens() -> None:
    values = torch.randn(10, 1536, generator=torch.Generator().manual_seed(0))
    here, there = (sample(values.to(device), mixed_rows(1536)) for device in ("cpu", "cuda"))
    assert [token(t).id for t in here] == [token(t).id for t in there]


def test_a_seeded_row_repeats_and_seeds_differ() -> None:
    row = [0.0] * 1000
    assert one(row, seed=5, position=3).id == one(row, seed=5, position=3).id
    assert len({one(row, seed=s).id for s in range(20)}) > 15
    assert len({one(row, seed=0, position=p).id for p in range(20)}) > 15
    assert len({one(row, seed=0, choice=c).id for c in range(20)}) > 15


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=0), Sampling(top_p=0.5, logprobs=4), Sampling(script=(0,))],
    ids=["greedy", "filtered", "scripted"],
)
def test_bad_logits_poison_their_own_row_only(bad: float, sampling: Sampling) -> None:
    values = torch.zeros(3, 50)
    values[1, 17] = bad
    first, middle, last = sample(values, [Row(sampling=sampling, position=0)] * 3)
    assert isinstance(middle, PoisonedState)
    assert "1 of 50 logits are not finite at token 0" in str(middle)
    assert token(first) == token(last)


def test_logits_are_left_as_they_were() -> None:
    values = torch.randn(10, 64)
    before = values.clone()
    sample(values, mixed_rows(64))
    assert torch.equal(values, before)


@pytest.mark.parametrize(
    "values", [torch.zeros(2, 5, dtype=torch.bfloat16), torch.zeros(3, 5), torch.zeros(5)]
)
def test_wrong_logits_are_refused(values: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="float32 \\[2, vocab\\] is needed"):
        sample(values, [Row(sampling=Sampling())] * 2)


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.zeros(0, 5), []) == []
