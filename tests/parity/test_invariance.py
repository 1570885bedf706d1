"""On the reference path no neighbour, place or budget changes a bit of a request."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.models import Loaded, Request, allocate, chunks, pages_for, steps

PROPERTY = settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def scattered(loaded: Loaded, totals: list[int], seed: int):
    """Memory full of NaN, and requests whose slots and pages are shuffled."""
    shuffle = random.Random(seed)
    counts = [pages_for(n) for n in totals]
    pages, slots = list(range(sum(counts) + 3)), list(range(len(totals) + 2))
    shuffle.shuffle(pages)
    shuffle.shuffle(slots)
    requests = [
        Request(slots[i], tuple(pages.pop() for _ in range(count)))
        for i, count in enumerate(counts)
    ]
    memory = allocate(loaded.spec.text, slots=len(slots), pages=sum(counts) + 3, dtype=loaded.dtype)
    return memory, requests


def prefill(loaded: Loaded, prompts: list[list[int]], extra: int, budget: int, seed: int):
    """Absorb prompts `budget` chunks a pass, round robin in a shuffled order; last logits each."""
    memory, requests = scattered(loaded, [len(p) + extra for p in prompts], seed)
    order = random.Random(seed + 1)
    logits: dict[int, torch.Tensor] = {}
    while len(logits) < len(prompts):
        waiting = [i for i in range(len(prompts)) if i not in logits]
        order.shuffle(waiting)
        left, shares, owners = budget, [], []
        for i in waiting:
            rest = prompts[i][requests[i].absorbed :]
            take = rest[: 64 * order.randint(1, max(1, left))]
            if left <= 0:
                break
            left -= pages_for(len(take))
            ends = len(take) == len(rest)
            shares.append(requests[i].share(take, want_logits=ends))
            owners += [i] if ends else []
        out = loaded.model.forward(chunks(*shares), memory)
        logits.update(zip(owners, out, strict=True))
    return memory, requests, [logits[i] for i in range(len(prompts))]


def memory_of(memory, request: Request) -> list[torch.Tensor]:
    latents = memory.latent[list(request.pages)].transpose(1, 2).flatten(0, 1)[: request.absorbed]
    return [memory.state[request.slot], memory.conv[request.slot], latents]


def random_prompts(lengths, vocab: int, seed: int) -> list[list[int]]:
    r = random.Random(seed)
    return [[r.randrange(vocab) for _ in range(n)] for n in lengths]


def assert_same_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


VARIANTS = [
    ("nano", torch.float32),
    ("linear_mini", torch.float32),
    ("k3", torch.float32),
    ("nano", torch.bfloat16),
]


@pytest.mark.parametrize(("variant", "dtype"), VARIANTS)
@PROPERTY
@given(
    lengths=st.lists(st.integers(1, 200), min_size=2, max_size=5),
    budget=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_neighbours_order_and_budget_change_no_bit_of_a_prompt(
    tiny, variant, dtype, lengths, budget, seed
) -> None:
    loaded = tiny(variant, dtype)
    prompts = random_prompts(lengths, loaded.spec.text.vocab - 1, seed)
    memory, requests, logits = prefill(loaded, prompts, 0, budget, seed)
    for prompt, request, row in zip(prompts, requests, logits, strict=True):
        own, (single,), (expected,) = prefill(loaded, [prompt], 0, 99, 7)
        assert torch.equal(row, expected)
        assert_same_bits(memory_of(memory, request), memory_of(own, single))


@pytest.mark.parametrize(("variant", "dtype"), VARIANTS)
@PROPERTY
@given(lengths=st.lists(st.integers(1, 130), min_size=2, max_size=11), seed=st.integers(0, 99))
def test_neighbours_and_place_change_no_bit_of_a_step(tiny, variant, dtype, lengths, seed) -> None:
    loaded = tiny(variant, dtype)
    vocab = loaded.spec.text.vocab - 1
    prompts = random_prompts(lengths, vocab, seed)
    following = random_prompts([3] * len(lengths), vocab, seed + 1)
    memory, requests, _ = prefill(loaded, prompts, 3, 99, seed)
    alone, singles, _ = prefill(loaded, prompts, 3, 99, seed + 5)
    order = random.Random(seed)
    for t in range(3):
        chosen = list(range(len(lengths)))
        order.shuffle(chosen)
        together = loaded.model.forward(
            steps(*(requests[i].share([following[i][t]]) for i in chosen)), memory
        )
        for i, row in zip(chosen, together, strict=True):
            single = loaded.model.forward(steps(singles[i].share([following[i][t]])), alone)
            assert torch.equal(row, single[0])
    for a, b in zip(requests, singles, strict=True):
        assert_same_bits(memory_of(memory, a), memory_of(alone, b))


@pytest.mark.parametrize("variant", ["nano", "linear_mini"])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65])
def test_later_tokens_change_no_bit_of_earlier_outputs(tiny, variant, length) -> None:
    loaded = tiny(variant)
    tokens = random_prompts([130, 130], loaded.spec.text.vocab - 1, 3)
    longer = tokens[0][:length] + tokens[1][length:]
    (_, _, (short,)) = prefill(loaded, [tokens[0][:length]], 0, 9, 1)
    for prompt in (longer, longer[: length + 1]):
        memory, (request,) = scattered(loaded, [len(prompt)], 2)
        _, states = loaded.model.capture(
            chunks(request.share(prompt)), memory, layers=(3,), convention="prefix"
        )
        own, (single,) = scattered(loaded, [length], 4)
        _, expected = loaded.model.capture(
            chunks(single.share(tokens[0][:length])), own, layers=(3,), convention="prefix"
        )
        assert torch.equal(states.states[0][:length], expected.states[0])
        kept = memory.latent[list(request.pages)].transpose(1, 2).flatten(0, 1)[:length]
        assert torch.equal(kept, memory_of(own, single)[2])
    assert torch.isfinite(short).all()


def test_a_reused_slot_and_stale_pages_leak_nothing(tiny) -> None:
    loaded = tiny("nano")
    (prompt,) = random_prompts([70], 1280, 5)
    fresh = allocate(loaded.spec.text, slots=1, pages=2)
    stale = allocate(loaded.spec.text, slots=1, pages=2, fill=3.0)
    for memory in (fresh, stale):
        memory.latent.nan_to_num_(nan=1e4)
    a, b = (
        loaded.model.forward(chunks(Request(0, (0, 1)).share(prompt)), memory)
        for memory in (fresh, stale)
    )
    assert torch.equal(a, b)


def test_padding_touches_no_page_and_no_other_slot(tiny) -> None:
    loaded = tiny("nano")
    memory = allocate(loaded.spec.text, slots=3, pages=5)
    request = Request(1, (2, 4))
    loaded.model.forward(chunks(request.share(range(70))), memory)
    loaded.model.forward(steps(request.share([9])), memory)
    assert memory.latent[4, :, 7:].isnan().all() and memory.latent[[0, 1, 3]].isnan().all()
    assert memory.latent[2].isfinite().all() and memory.latent[4, :, :7].isfinite().all()
    assert memory.state[[0, 2]].isnan().all() and memory.conv[[0, 2]].isnan().all()


def test_only_the_shares_that_want_logits_get_them_in_order(tiny) -> None:
    loaded = tiny("nano")
    prompts = random_prompts([3, 70, 5], 1280, 8)
    memory, requests = scattered(loaded, [3, 70, 5], 1)
    wants = (True, False, True)
    shares = [r.share(p, want_logits=w) for r, p, w in zip(requests, prompts, wants, strict=True)]
    logits = loaded.model.forward(chunks(*shares), memory)
    single = [prefill(loaded, [p], 0, 9, 1)[2][0] for p in (prompts[0], prompts[2])]
    assert torch.equal(logits, torch.stack(single))
    none = loaded.model.forward(chunks(Request(0, (0,)).share([1], want_logits=False)), memory)
    assert none.shape == (0, loaded.spec.text.vocab)


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (steps(Request(0, (0,)).share([1, 2])), "must have one"),
        (chunks(Request(0, (0,), absorbed=3).share([1])), "off the grid"),
        (chunks(Request(0, (0,)).share(range(65))), "1 pages for 65 tokens"),
    ],
)
def test_a_share_off_the_grid_or_without_pages_is_refused(tiny, batch, says) -> None:
    loaded = tiny("nano")
    with pytest.raises(ValueError, match=says):
        loaded.model.forward(batch, allocate(loaded.spec.text, slots=1, pages=1))
