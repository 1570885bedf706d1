"""What choosing tokens costs on a CPU: `OMP_NUM_THREADS=1 python -m benchmarks.sampling`."""

from __future__ import annotations

import torch

from benchmarks.harness import measure, record
from common.contract.messages import Sampling
from common.sampling.sampler import Row, sample

VOCABULARIES = {"nano": 1536, "release": 163_840}
KINDS = {
    "greedy": Sampling(temperature=0.0),
    "greedy, 5 logprobs": Sampling(temperature=0.0, logprobs=5),
    "draw": Sampling(),
    "draw, min_p": Sampling(min_p=0.05),
    "draw, top_p": Sampling(top_p=0.9),
    "draw, everything": Sampling(
        top_k=50, top_p=0.9, min_p=0.01, repetition=1.1, presence=0.5, logprobs=5
    ),
}


def main() -> None:
    torch.manual_seed(0)
    for name, vocab in VOCABULARIES.items():
        for rows in (1, 8):
            logits = 3 * torch.randn(rows, vocab)
            for kind, sampling in KINDS.items():
                batch = [
                    Row(sampling=sampling, position=i, counts={5: 2, 7: 1}) for i in range(rows)
                ]
                timing = measure(lambda x=logits, b=batch: sample(x, b), runs=9, least_s=0.2)
                case = {"vocabulary": name, "ids": vocab, "rows": rows, "kind": kind}
                record("sampling", case, timing)
                print(f"{name:8} {rows} rows  {kind:20} {timing.p50 * 1e3:8.3f} ms")


if __name__ == "__main__":
    main()
