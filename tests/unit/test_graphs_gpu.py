"""Steps on a device: a graph is what it captured, and `exact` gives every row its own bits."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from benchmarks.slice import BF16, SMALL, memory, weights
from common.config.settings import DecodeSettings
from common.model.batch import Memory, Share, StepBatch
from common.model.text import TextModel
from common.ops.select import choose
from common.runtime.graphs import GraphedModel, graph_bytes
from common.runtime.recorder import Cuda, Eager, settle

pytestmark = pytest.mark.gpu
MOST, WIDTH, SLOTS = 9, 6, 70


def made(exact: bool) -> TextModel:
    torch.manual_seed(0)
    device = torch.device("cuda")
    ops, _ = choose("auto", SMALL, quantization="mxfp4", dtype=BF16, device=device, exact=exact)
    return TextModel(SMALL, weights(SMALL), ops=ops, exact=exact)


@pytest.fixture(scope="module")
def default() -> TextModel:
    return made(exact=False)


@pytest.fixture(scope="module")
def exact() -> TextModel:
    return made(exact=True)


def pools() -> Memory:
    torch.manual_seed(1)
    made = memory(SMALL, SLOTS, SLOTS * WIDTH)
    made.state.normal_()
    made.conv.normal_()
    return made


def share(slot: int, start: int) -> Share:
    pages = tuple(slot * WIDTH + (slot + i) % WIDTH for i in range(WIDTH))
    return Share(slot=slot, pages=pages, start=start, token_ids=((slot * 31 + start) % 1000,))


def history() -> Iterator[list[Share]]:
    """Requests join and leave; each goes on where it stopped."""
    at = {slot: 17 * slot + 1 for slot in range(20)}
    shuffle = random.Random(0)
    for _ in range(12):
        slots = shuffle.sample(sorted(at), shuffle.randint(1, MOST))
        yield [share(slot, at[slot]) for slot in slots]
        for slot in slots:
            at[slot] += 1


def same(mine: Memory, theirs: Memory) -> bool:
    return all(
        torch.equal(getattr(mine, n), getattr(theirs, n)) for n in ("state", "conv", "latent")
    )


@pytest.mark.parametrize("kind", ["default", "exact"])
def test_a_replay_is_bit_for_bit_what_its_work_gives_run_eagerly(kind: str, request) -> None:
    model = request.getfixturevalue(kind)
    mine, theirs = pools(), pools()
    graphs = GraphedModel(model, mine, most=MOST, width=WIDTH, recorder=Cuda())
    eager = GraphedModel(model, theirs, most=MOST, width=WIDTH, recorder=Eager())
    assert same(mine, theirs)
    assert same(mine, pools())
    for shares in history():
        batch = StepBatch(kind="steps", shares=tuple(shares))
        assert torch.equal(graphs.forward(batch, mine), eager.forward(batch, theirs))
        assert same(mine, theirs)


def test_a_step_that_nobody_samples_is_waited_for() -> None:
    torch.cuda._sleep(500_000_000)
    logits = torch.zeros(0, 5, device="cuda")
    last = torch.cuda.Event()
    last.record()
    assert not last.query()
    settle(logits)
    assert last.query()


def test_graphs_take_no_more_than_is_planned(default: TextModel) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    free = torch.cuda.mem_get_info()[0]
    held = GraphedModel(default, pools(), most=64, width=WIDTH)
    decode = DecodeSettings(max_batch=64, pages=WIDTH)
    taken = max(torch.cuda.memory_reserved() - before, free - torch.cuda.mem_get_info()[0])
    pooled = sum(
        t.numel() * t.element_size() for t in (pools().state, pools().conv, pools().latent)
    )
    print(f"graphs of 64 rows took {(taken - pooled) / 2**20:.0f} MiB")
    assert taken - pooled <= graph_bytes(SMALL, "bfloat16", decode)
    del held


def test_exact_gives_a_row_the_same_bits_in_every_batch_and_place(exact: TextModel) -> None:
    starts = {slot: (37 * slot) % (64 * WIDTH - 1) + 1 for slot in range(64)}
    wanted, fresh = {}, pools()
    for slot, start in starts.items():
        batch = StepBatch(kind="steps", shares=(share(slot, start),))
        wanted[slot] = exact.forward(batch, fresh)[0]
    for count in (2, 3, 7, 16, 33, 64):
        slots = random.Random(count).sample(range(64), count)
        mine = pools()
        batch = StepBatch(kind="steps", shares=tuple(share(s, starts[s]) for s in slots))
        for slot, logits in zip(slots, exact.forward(batch, mine), strict=True):
            assert torch.equal(logits, wanted[slot]), (count, slot)
            for name in ("state", "conv"):
                assert torch.equal(getattr(mine, name)[slot], getattr(fresh, name)[slot])


def test_exact_replays_give_the_bits_of_a_row_alone(exact: TextModel) -> None:
    mine, alone = pools(), pools()
    graphs = GraphedModel(exact, mine, most=MOST, width=WIDTH)
    for shares in history():
        found = graphs.forward(StepBatch(kind="steps", shares=tuple(shares)), mine)
        for one, logits in zip(shares, found, strict=True):
            wanted = exact.forward(StepBatch(kind="steps", shares=(one,)), alone)[0]
            assert torch.equal(logits, wanted)


def test_exact_prompts_have_their_bits_whatever_the_passes(exact: TextModel) -> None:
    ids = [(7 * i) % 1000 for i in range(300)]

    def run(passes: list[list[tuple[int, int]]]) -> torch.Tensor:
        """Each pass: (slot, tokens)."""
        mine, at, last = pools(), dict.fromkeys(range(3), 0), None
        for parts in passes:
            shares = []
            for slot, count in parts:
                pages = tuple(range(slot * WIDTH, slot * WIDTH + WIDTH))
                tokens = tuple(ids[at[slot] : at[slot] + count])
                shares.append(Share(slot=slot, pages=pages, start=at[slot], token_ids=tokens))
                at[slot] += count
            last = exact.forward(StepBatch(kind="chunks", shares=tuple(shares)), mine)
        return last[[slot for slot, _ in passes[-1]].index(1)]

    whole = run([[(1, 300)]])
    assert torch.equal(run([[(0, 64), (1, 128)], [(2, 200), (1, 172)]]), whole)
    assert torch.equal(run([[(1, 64)], [(1, 64)], [(1, 172), (0, 10)]]), whole)
