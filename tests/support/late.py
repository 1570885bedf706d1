"""A READ over tcp that outlives its request, and what must not change meanwhile (D1)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from common.cache.allocator import Allocator
from common.contract.regions import Span
from common.errors import CapacityError, DeadlineExceeded
from common.transfer.nixl import NixlLink
from common.transfer.receiver import Receiver
from tests.support.producer import OtherProcess

PAGES, PAGE_WORDS = 160, 1 << 18  # 1 MiB a page
WANTED = 128  # pages of the request that gives up


def wait_for(claim: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + 10
    while not claim():
        assert time.monotonic() < until, f"waited 10 s for {what}"
        time.sleep(0.0005)


class Consumer:
    """A room with one pool of pages, and requests that want most of them."""

    def __init__(self, producer: OtherProcess):
        self.producer = producer
        self.memory = torch.zeros((PAGES, PAGE_WORDS), dtype=torch.int32)
        self.link, self.pages = NixlLink("late-consumer", transports="tcp"), Allocator(PAGES)
        self.link.register("state", self.memory)
        self.receiver = Receiver(self.link, quarantine_bound=1)

    def give_up(self) -> tuple[int, ...] | None:
        """Stop the producer in mid-READ until the request gave up; None: it was too late."""
        mine = self.pages.take(WANTED)
        self.pages.share(mine)  # the READ's own hold; `on_free` gives it back
        self.memory[:WANTED] = 0
        whole = Span(pool="state", offset=0, size=4 * PAGE_WORDS * WANTED)
        pairs, raised = [(whole, whole)], []

        def fetch() -> None:
            give = partial(self.pages.give, mine)
            try:
                self.receiver.fetch(self.producer.endpoint, pairs, 0.4, lambda: False, give)
            except DeadlineExceeded as error:
                raised.append(type(error))

        thread = threading.Thread(target=fetch)
        thread.start()
        wait_for(lambda: bool(self.memory[:8, 0].any()), "the first bytes")
        self.producer.stall()
        thread.join(10)
        self.pages.give(mine)  # the request is over
        if raised:
            return mine
        self.producer.resume()
        return None


def give_up_and_go_on(producer: OtherProcess) -> None:
    room = Consumer(producer)
    producer.fill(1)
    attempts = (room.give_up() for _ in range(10))
    mine = next((pages for pages in attempts if pages is not None), None)
    assert mine is not None, "the READ was over before the producer was stopped, ten times"
    receiver, pages, memory = room.receiver, room.pages, room.memory
    assert receiver.quarantined == 1 and receiver.must_restart

    with pytest.raises(CapacityError):
        pages.take(WANTED)
    other = list(pages.take(PAGES - WANTED))
    assert set(other).isdisjoint(mine)
    memory[other] = 77
    before = memory[:WANTED].clone()

    producer.resume()
    wait_for(lambda: receiver.sweep() == 1, "the end of the READ")
    late = int((memory[:WANTED] != before).any(1).sum())
    assert late > 0, "nothing landed after the deadline, so this run proved nothing"
    assert (memory[other] == 77).all()
    assert receiver.quarantined == 0 and not receiver.must_restart

    again = list(pages.take(WANTED))
    memory[again] = 99
    time.sleep(0.1)
    assert (memory[again] == 99).all() and pages.free == 0
    pages.check_integrity()
