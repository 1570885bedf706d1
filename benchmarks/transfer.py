"""What a hand-off costs beside its computation: `OMP_NUM_THREADS=1 python -m benchmarks.transfer`.

Digests of one request's memory, and READs of it from another process, in one host's memory and over
tcp. The request is nano's with 1000 tokens; 64 MiB stand for a larger one.
"""

from __future__ import annotations

import torch

from benchmarks.harness import measure, record
from common.contract.regions import Span
from common.ops.digest import digest_pages, digest_words
from common.transfer.nixl import NixlLink
from common.transfer.receiver import Receiver
from tests.support.producer import OtherProcess, pool_of_words

STATE, CONV, PAGES = (6, 4, 64, 64), (6, 4, 3, 3, 64), (16, 2, 64, 80)  # nano, fp32
REQUEST = tuple(4 * torch.Size(shape).numel() for shape in (STATE, CONV, PAGES))
LARGE = (64 << 20,)


def digests() -> None:
    state, pages = torch.randn(STATE), torch.randn(PAGES)
    for kind, memory, digest in (
        ("state", state, lambda: digest_words(state)),
        ("latent", pages, lambda: digest_pages(pages)),
    ):
        timing = measure(digest, runs=50)
        record("transfer", {"what": "digest", "kind": kind, "bytes": memory.nbytes}, timing)
        print(f"digest {kind:8} {memory.nbytes:10} bytes {timing.p50 * 1e3:8.3f} ms")


def reads(transports: str) -> None:
    words = sum(LARGE) // 4
    link = NixlLink(f"bench-{transports or 'host'}", transports=transports)
    pool_of_words(link, words)
    receiver = Receiver(link, quarantine_bound=1)
    producer = OtherProcess("p0", transports=transports, words=words)
    try:
        producer.fill(1)
        for name, sizes in (("request", REQUEST), ("large", LARGE)):
            spans, at = [], 0
            for size in sizes:
                spans.append(Span(pool="state", offset=at, size=size))
                at += size
            pairs = [(span, span) for span in spans]

            def fetch(pairs=pairs) -> None:
                receiver.fetch(producer.endpoint, pairs, 30.0, lambda: False, lambda: None)

            timing = measure(fetch, runs=20)
            over = transports or "one host's memory"
            record("transfer", {"what": "read", "over": over, "bytes": sum(sizes)}, timing)
            print(f"read {name:8} {sum(sizes):10} bytes over {over:18} {timing.p50 * 1e3:8.3f} ms")
    finally:
        producer.close()


def main() -> None:
    torch.set_num_threads(1)
    digests()
    for transports in ("", "tcp"):
        reads(transports)


if __name__ == "__main__":
    main()
