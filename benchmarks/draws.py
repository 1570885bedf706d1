"""Draw many tokens on the device and on the CPU and count where they differ.

    python -m benchmarks.draws OUT.jsonl [DRAWS]

Both sides get the same logits and rows. Where the tokens differ, the gap is how far the CPU's
winner lies above the device's token in the CPU's own scores: a near tie, or not.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks.timing import append, machine
from common.contract.messages import Sampling
from common.sampling import device, noise, sampler
from common.sampling.rows import Row

CHUNK = 4096
KINDS = {
    "plain": (Sampling(), 1000),
    "cool, min_p": (Sampling(temperature=0.6, min_p=0.02), 1000),
    "top_p": (Sampling(temperature=0.9, top_p=0.9), 1000),
    "top_k, top_p": (Sampling(top_k=40, top_p=0.95), 1000),
    "plain, the release's vocabulary": (Sampling(), 163_840),
}


def gap(logits: torch.Tensor, row: Row, ours: int, theirs: int) -> float:
    """By how much the CPU prefers its own token, in units of log-probability."""
    s = row.sampling
    key = torch.tensor([noise.row_key(seed=s.seed, choice=row.choice, position=row.position)])
    scores = noise.gumbel(key, len(logits))[0] + logits.double() / s.temperature
    return float(scores[theirs] - scores[ours])


def main() -> None:
    """A quarter of the draws a kind; few over the whole vocabulary, which a CPU takes long for."""
    torch.set_num_threads(16)
    path, most = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1 << 20
    for number, (kind, (sampling, vocab)) in enumerate(KINDS.items()):
        chunk = CHUNK if vocab == 1000 else 64
        draws, different, largest = 0, 0, 0.0
        while draws < (most // 4 if vocab == 1000 else most // 512):
            generator = torch.Generator().manual_seed(draws + number)
            logits = 3 * torch.randn(chunk, vocab, generator=generator)
            rows = [Row(sampling=sampling, position=draws + i) for i in range(chunk)]
            ours = device.launch(logits.cuda(), rows).tokens
            theirs, _ = sampler._choose(logits, rows)
            for i in (ours.cpu() != theirs).nonzero().flatten().tolist():
                different += 1
                largest = max(largest, gap(logits[i], rows[i], int(ours[i]), int(theirs[i])))
            draws += chunk
        case = {"kind": kind, "ids": vocab, "draws": draws}
        line = {"op": "draws", "case": case, "different": different, "largest_gap": largest}
        append(path, line | {"machine": machine()})
        print(line, flush=True)


if __name__ == "__main__":
    main()
