"""A producer in a process of its own: one pool behind a NIXL agent, told by lines what to do.

Run as `python -m tests.support.producer ID EPOCH TRANSPORTS WORDS`. It writes its endpoint in hex,
then obeys `fill SEED` (answered with `done`) until its input ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import cached_property

import torch

from common.contract.messages import Endpoint, pack, unpack
from common.contract.regions import PoolInfo
from common.transfer.link import Link
from common.transfer.local import Fabric, LocalLink
from tests.support.wire import endpoint


def content(seed: int, words: int) -> torch.Tensor:
    """What `fill SEED` puts into a pool: no word is zero."""
    return torch.arange(1, words + 1, dtype=torch.int32).mul_(2 * seed + 1)


class OtherProcess:
    """The NIXL flavour: a real process that can be stopped, continued and killed."""

    def __init__(
        self,
        id: str,
        *,
        epoch: int = 1,
        transports: str = "",
        words: int = 1 << 16,
        before: tuple[str, ...] = (),
    ):
        """`before`: a command that runs the producer's command line."""
        module = [sys.executable, "-m", "tests.support.producer"]
        self._process = subprocess.Popen(
            [*before, *module, id, str(epoch), transports, str(words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.words, self.pid = words, self._process.pid

    @cached_property
    def endpoint(self) -> Endpoint:
        """Who it is; waits until it has started."""
        answer = unpack(bytes.fromhex(self._line()))
        assert isinstance(answer, Endpoint)
        return answer

    def fill(self, seed: int) -> torch.Tensor:
        assert self.endpoint  # it has started
        self.write(b"fill %d\n" % seed)
        assert self._line() == "done"
        return content(seed, self.words)

    def write(self, line: bytes) -> None:
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def stall(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        self._process.stdin.close()
        self._process.stdout.close()

    def _line(self) -> str:
        for line in self._process.stdout:
            if line.startswith((b"endpoint ", b"done")):
                return line.decode().removeprefix("endpoint ").strip()
        raise AssertionError(f"the producer ended with {self._process.wait()}")


class SameProcess:
    """The in-process flavour."""

    def __init__(self, fabric: Fabric, id: str, *, epoch: int = 1, words: int = 1 << 16):
        self._fabric, self._link = fabric, LocalLink(f"agent-{id}-{epoch}", fabric)
        self.words, self._pool = words, torch.zeros(words, dtype=torch.int32)
        self.endpoint = endpoint(
            self._link, id, (self._link.register("state", self._pool),), epoch=epoch
        )

    def fill(self, seed: int) -> torch.Tensor:
        self._pool.copy_(content(seed, self.words))
        return content(seed, self.words)

    def stall(self) -> None:
        self._fabric.stall(self._link.agent)

    def resume(self) -> None:
        self._fabric.resume(self._link.agent)

    def kill(self) -> None:
        self._fabric.kill(self._link.agent)

    def close(self) -> None:
        self.kill()


def pool_of_words(link: Link, words: int, name: str = "state") -> tuple[torch.Tensor, PoolInfo]:
    pool = torch.zeros(words, dtype=torch.int32)
    return pool, link.register(name, pool)


def main() -> None:
    id, epoch, transports, words = sys.argv[1:]
    from common.transfer.nixl import (
        NixlLink,
    )  # only here: the tests' own process chooses for itself

    link = NixlLink(f"agent-{id}-{epoch}", transports=transports)
    pool, info = pool_of_words(link, int(words))
    sys.stdout.write(f"endpoint {pack(endpoint(link, id, (info,), epoch=int(epoch))).hex()}\n")
    sys.stdout.flush()
    for line in sys.stdin:
        pool.copy_(content(int(line.split()[1]), int(words)))
        sys.stdout.write("done\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
