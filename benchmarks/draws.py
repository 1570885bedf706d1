"""Draw many tokens on the device and on the CPU and count where they differ.

    python -m benchmarks.draws cpu TOKENS.npz [DRAWS [PROCESSES]]
    python -m benchmarks.draws OUT.jsonl TOKENS.npz [VOCABULARY]

The first makes a CPU's tokens and needs no device, the second draws the same ones on it. Both make
the same logits bit for bit: sums of integers, times one number. Where tokens differ, the gap is how
far the CPU's winner lies above the device's in the CPU's own scores: a near tie, or not. A number
of ids runs the kinds over so many alone.
"""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

import numpy
import torch

from benchmarks.timing import append, machine
from common.contract.messages import Sampling
from common.sampling import noise, sampler
from common.sampling.rows import Row

SMALL, RELEASE = 1000, 163_840  # ids
KINDS = {
    "plain": (Sampling(), SMALL),
    "cool, min_p": (Sampling(temperature=0.6, min_p=0.02), SMALL),
    "top_p": (Sampling(temperature=0.9, top_p=0.9), SMALL),
    "top_k, top_p": (Sampling(top_k=40, top_p=0.95), SMALL),
    "plain, the release's vocabulary": (Sampling(), RELEASE),
    "top_p, the release's vocabulary": (Sampling(top_p=0.9), RELEASE),
    "top_k, top_p, the release's vocabulary": (Sampling(top_k=2000, top_p=0.8), RELEASE),
    "flat, top_p, the release's vocabulary": (Sampling(temperature=3.0, top_p=0.97), RELEASE),
}
Task = tuple[str, int, int]  # kind, number of the chunk, draws in it


def tasks_of(kind: str, most: int) -> list[Task]:
    """A quarter of the draws a kind; few over the whole vocabulary, which a CPU takes long for."""
    is_small = KINDS[kind][1] == SMALL
    count, draws = (4096, most // 4) if is_small else (64, most // 2048)
    return [(kind, number, min(count, draws)) for number in range(max(1, draws // count))]


def given(task: Task, device: str) -> tuple[torch.Tensor, list[Row]]:
    """A chunk's logits, spread like three times a normal's, and rows; everywhere the same."""
    kind, number, count = task
    sampling, vocab = KINDS[kind]
    first = 1 << 40 | list(KINDS).index(kind) << 32 | number * count
    bits = noise.bits(torch.arange(first, first + count, device=device), vocab)
    total = sum((bits >> shift) & 0xFFFF for shift in (0, 16, 32, 48))
    logits = (total - 2 * 0xFFFF).float() * 8e-5
    return logits, [Row(sampling=sampling, position=number * count + i) for i in range(count)]


def on_cpu(task: Task) -> numpy.ndarray:
    """The definition's tokens."""
    torch.set_num_threads(1)
    return sampler._choose(*given(task, "cpu"))[0].numpy().astype(numpy.int32)


def gap(logits: torch.Tensor, row: Row, ours: int, theirs: int) -> float:
    """By how much the CPU prefers its own token, in units of log-probability."""
    s = row.sampling
    key = torch.tensor([noise.row_key(seed=s.seed, choice=row.choice, position=row.position)])
    scores = noise.gumbel(key, len(logits))[0] + logits.double() / s.temperature
    return float(scores[theirs] - scores[ours])


def make(path: Path, most: int, processes: int) -> None:
    """Keep a CPU's tokens."""
    found = {}
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for kind in KINDS:
            found[kind] = numpy.concatenate(list(pool.imap(on_cpu, tasks_of(kind, most))))
            print(kind, len(found[kind]), flush=True)
    numpy.savez_compressed(path, draws=most, **found)


def compare(path: Path, tokens: Path, only: int) -> None:
    """Draw the same and keep a line a kind; over a vocabulary alone, or 0 for all."""
    from common.sampling import device

    kept = numpy.load(tokens)
    for kind, (_, vocab) in KINDS.items():
        if only not in (0, vocab):
            continue
        theirs, at, different, largest = torch.from_numpy(kept[kind]), 0, 0, 0.0
        for task in tasks_of(kind, int(kept["draws"])):
            logits, rows = given(task, "cuda")
            ours = device.launch(logits, rows).tokens.cpu()
            expected = theirs[at : at + len(rows)]
            at += len(rows)
            for i in (ours != expected).nonzero().flatten().tolist():
                different += 1
                far = gap(logits[i].cpu(), rows[i], int(ours[i]), int(expected[i]))
                largest = max(largest, far)
        case = {"kind": kind, "ids": vocab, "draws": at}
        line = {"op": "draws", "case": case, "different": different, "largest_gap": largest}
        append(path, line | {"machine": machine()})
        print(line, flush=True)


def main() -> None:
    """The CPU's part or the device's."""
    if sys.argv[1] == "cpu":
        most = int(sys.argv[3]) if len(sys.argv) > 3 else 1 << 20
        make(Path(sys.argv[2]), most, int(sys.argv[4]) if len(sys.argv) > 4 else 8)
    else:
        compare(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else 0)


if __name__ == "__main__":
    main()
