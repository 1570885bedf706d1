"""One suite of promises, three ways to move bytes: in one process, memory of one host, tcp."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time

import msgspec
import pytest
import torch

from common.contract.regions import Span
from common.errors import TransferError
from common.transfer.local import Fabric, LocalLink
from common.transfer.nixl import NixlLink
from common.transfer.receiver import Receiver
from tests.support.producer import OtherProcess, SameProcess, pool_of_words

WORDS = 1 << 21  # 8 MiB
numbers = itertools.count()


def span(first: int, count: int, pool: str = "state") -> Span:
    return Span(pool=pool, offset=4 * first, size=4 * count)


class Side:
    """A consumer with one pool, and how it gets producers."""

    def __init__(self, flavour: str):
        self.flavour, self.fabric, self._made = flavour, Fabric(), []
        name = f"consumer-{next(numbers)}"
        if flavour == "local":
            self.link = LocalLink(name, self.fabric)
        else:
            self.link = NixlLink(name, transports=self.transports)
        self.pool, self.info = pool_of_words(self.link, WORDS)

    @property
    def transports(self) -> str:
        return "tcp" if self.flavour == "tcp" else ""

    def producer(self, id: str, *, epoch: int = 1, words: int = WORDS):
        if self.flavour == "local":
            made = SameProcess(self.fabric, id, epoch=epoch, words=words)
        else:
            made = OtherProcess(id, epoch=epoch, transports=self.transports, words=words)
        self._made.append(made)
        return made

    def finish(self, read) -> None:
        until = time.monotonic() + 20
        while not read.poll():
            assert time.monotonic() < until, "the READ never ended"
            time.sleep(0.001)
        read.release()

    def close(self) -> None:
        for made in self._made:
            made.close()


@pytest.fixture(scope="module", params=["local", "host", "tcp"])
def side(request):
    side = Side(request.param)
    yield side
    side.close()


@pytest.fixture(scope="module")
def producer(side):
    producer = side.producer("p0")
    side.link.connect(producer.endpoint)
    return producer


def test_bytes_arrive_as_they_are_at_the_producer(side, producer):
    for seed in (1, 2):
        expected = producer.fill(seed)
        side.finish(side.link.read(producer.endpoint, [(span(0, WORDS), span(0, WORDS))]))
        assert torch.equal(side.pool, expected)


def test_pairs_land_where_they_are_sent_and_nowhere_else(side, producer):
    expected = producer.fill(3)
    side.pool.zero_()
    pairs = [(span(16 * i, 5), span(16 * (63 - i) + 2, 5)) for i in range(64)]
    side.finish(side.link.read(producer.endpoint, pairs))
    rows, want = side.pool[:1024].view(64, 16), expected[:1024].view(64, 16).flip(0)
    assert torch.equal(rows[:, :5], want[:, 2:7])
    assert not rows[:, 5:].any() and not side.pool[1024:].any()


@pytest.mark.parametrize(
    ("local", "remote", "complaint"),
    [
        (span(0, 8), span(WORDS - 4, 8), "lies outside"),
        (span(WORDS - 4, 8), span(0, 8), "lies outside"),
        (span(0, 8), span(-4, 8), "lies outside"),
        (span(0, 8), span(0, 4), "reads 16 bytes into 32"),
        (span(0, 8), span(0, 8, "latent"), "no pool `latent`"),
        (span(0, 8, "latent"), span(0, 8), "no pool `latent`"),
    ],
    ids=[
        "past the end there",
        "past the end here",
        "before the start",
        "unequal",
        "unknown there",
        "unknown here",
    ],
)
def test_a_wrong_range_is_refused_before_any_byte_moves(side, producer, local, remote, complaint):
    producer.fill(4)
    side.pool.zero_()
    with pytest.raises(TransferError, match=complaint):
        side.link.read(producer.endpoint, [(span(100, 8), span(100, 8)), (local, remote)])
    time.sleep(0.01)
    assert not side.pool.any()


def test_only_a_connected_peer_in_its_epoch_is_read(side, producer):
    pairs = [(span(0, 8), span(0, 8))]
    with pytest.raises(TransferError, match="stranger is not connected"):
        side.link.read(msgspec.structs.replace(producer.endpoint, id="stranger"), pairs)
    with pytest.raises(TransferError, match="not connected in epoch 2"):
        side.link.read(msgspec.structs.replace(producer.endpoint, epoch=2), pairs)
    with pytest.raises(TransferError, match="is older"):
        side.link.connect(msgspec.structs.replace(producer.endpoint, epoch=0))
    side.link.connect(producer.endpoint)
    side.finish(side.link.read(producer.endpoint, pairs))


def test_metadata_of_another_agent_is_refused(side, producer):
    forged = msgspec.structs.replace(producer.endpoint, id="forged", agent="somebody")
    with pytest.raises(TransferError, match="forged"):
        side.link.connect(forged)


def test_registered_memory_outlives_its_makers_interest(side, producer):
    name = f"own-{next(numbers)}"
    side.link.register(name, torch.zeros(1 << 20))  # nobody else holds it
    gc.collect()
    producer.fill(9)
    for _ in range(20):
        target = Span(pool=name, offset=0, size=4 << 20)
        side.finish(side.link.read(producer.endpoint, [(target, span(0, 1 << 20))]))


def test_a_pool_is_registered_once_and_whole(side):
    with pytest.raises(TransferError, match="registered already"):
        side.link.register("state", torch.zeros(4))
    with pytest.raises(TransferError, match="not contiguous"):
        side.link.register("latent", torch.zeros(4, 4)[:, :2])


def test_a_dead_peer_is_an_error_and_its_successor_is_read(side):
    first, second = side.producer("p1", epoch=1, words=64), side.producer("p1", epoch=2, words=64)
    side.link.connect(first.endpoint)
    first.fill(5)
    pairs = [(span(0, 64), span(0, 64))]
    side.finish(side.link.read(first.endpoint, pairs))
    first.kill()
    with pytest.raises(TransferError):
        side.finish(side.link.read(first.endpoint, pairs))
    side.link.connect(second.endpoint)
    expected = second.fill(6)
    side.finish(side.link.read(second.endpoint, pairs))
    assert torch.equal(side.pool[:64], expected[:64])
    with pytest.raises(TransferError):
        side.link.read(first.endpoint, pairs)
    side.link.forget("p1")
    with pytest.raises(TransferError, match="not connected"):
        side.link.read(second.endpoint, pairs)


def test_a_stopped_peer_leaves_the_read_in_progress_and_its_handle_unreleased(side, producer):
    expected = producer.fill(7)
    producer.stall()
    try:
        read = side.link.read(producer.endpoint, [(span(0, WORDS), span(0, WORDS))])
        if side.flavour == "host":  # the reader copies by itself: nobody is waited for
            assert read.poll()
        else:
            assert not any(read.poll() or time.sleep(0.02) for _ in range(5))
            with pytest.raises(RuntimeError, match="in progress"):
                read.release()
    finally:
        producer.resume()
    side.finish(read)
    assert torch.equal(side.pool, expected)


async def test_the_event_loop_answers_while_a_transfer_thread_reads(side, producer):
    pairs = [(span(0, WORDS), span(0, WORDS))] * 64  # 512 MiB
    receiver, freed = Receiver(side.link, quarantine_bound=1), []
    arguments = (producer.endpoint, pairs, 20.0, lambda: False, lambda: freed.append(True))
    fetch = asyncio.create_task(asyncio.to_thread(receiver.fetch, *arguments))
    longest, last = 0.0, time.monotonic()
    while not fetch.done():
        await asyncio.sleep(0.002)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    await fetch
    assert freed == [True]
    assert longest < 0.5, f"the loop stood still for {longest:.3f} s"
