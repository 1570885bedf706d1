"""Draw many tokens on the device and on the CPU and count where they differ.

    python -m benchmarks.draws OUT.jsonl [DRAWS [PROCESSES]]

Both sides get the same logits and rows. Where the tokens differ, the gap is how far the CPU's
winner lies above the device's token in the CPU's own scores: a near tie, or not.
"""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

import torch

from benchmarks.timing import append, machine
from common.contract.messages import Sampling
from common.sampling import device, noise, sampler
from common.sampling.rows import Row

SMALL, RELEASE = 1000, 163_840  # ids
KINDS = {
    "plain": (Sampling(), SMALL),
    "cool, min_p": (Sampling(temperature=0.6, min_p=0.02), SMALL),
    "top_p": (Sampling(temperature=0.9, top_p=0.9), SMALL),
    "top_k, top_p": (Sampling(top_k=40, top_p=0.95), SMALL),
    "plain, the release's vocabulary": (Sampling(), RELEASE),
}
Task = tuple[str, int, int]  # kind, number of the chunk, draws in it


def given(task: Task) -> tuple[torch.Tensor, list[Row]]:
    """A chunk's logits and rows; the same in every process."""
    kind, number, count = task
    sampling, vocab = KINDS[kind]
    generator = torch.Generator().manual_seed(number * len(KINDS) + list(KINDS).index(kind))
    logits = 3 * torch.randn(count, vocab, generator=generator)
    return logits, [Row(sampling=sampling, position=number * count + i) for i in range(count)]


def on_cpu(task: Task) -> torch.Tensor:
    """The definition's tokens."""
    torch.set_num_threads(1)
    logits, rows = given(task)
    return sampler._choose(logits, rows)[0]


def gap(logits: torch.Tensor, row: Row, ours: int, theirs: int) -> float:
    """By how much the CPU prefers its own token, in units of log-probability."""
    s = row.sampling
    key = torch.tensor([noise.row_key(seed=s.seed, choice=row.choice, position=row.position)])
    scores = noise.gumbel(key, len(logits))[0] + logits.double() / s.temperature
    return float(scores[theirs] - scores[ours])


def main() -> None:
    """A quarter of the draws a kind; few over the whole vocabulary, which a CPU takes long for."""
    path = Path(sys.argv[1])
    most = int(sys.argv[2]) if len(sys.argv) > 2 else 1 << 20
    processes = int(sys.argv[3]) if len(sys.argv) > 3 else 8
    with multiprocessing.get_context("fork").Pool(processes) as pool:  # before CUDA is touched
        for kind, (_, vocab) in KINDS.items():
            count = 4096 if vocab == SMALL else 64
            draws = most // 4 if vocab == SMALL else most // 512
            tasks = [(kind, number, count) for number in range(draws // count)]
            different, largest = 0, 0.0
            for task, theirs in zip(tasks, pool.imap(on_cpu, tasks), strict=True):
                logits, rows = given(task)
                ours = device.launch(logits.cuda(), rows).tokens.cpu()
                for i in (ours != theirs).nonzero().flatten().tolist():
                    different += 1
                    largest = max(largest, gap(logits[i], rows[i], int(ours[i]), int(theirs[i])))
            case = {"kind": kind, "ids": vocab, "draws": len(tasks) * count}
            line = {"op": "draws", "case": case, "different": different, "largest_gap": largest}
            append(path, line | {"machine": machine()})
            print(line, flush=True)


if __name__ == "__main__":
    main()
