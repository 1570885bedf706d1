"""READs from several peers are one: they end together, and a failure waits for the others."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from common.contract.regions import Agent, Span
from common.errors import TransferError
from common.transfer.link import Together, at_rank
from common.transfer.local import Fabric, LocalLink
from tests.support.wire import endpoint


class Meeting:
    """Two peers with eight bytes each, and one that reads both."""

    def __init__(self) -> None:
        self.fabric = Fabric()
        self.into = torch.zeros(16, dtype=torch.uint8)
        self.here = LocalLink("here", self.fabric)
        self.here.register("state", self.into)
        self.sources = []
        for number, name in enumerate(("a", "b"), 1):
            link = LocalLink(name, self.fabric)
            pool = link.register("state", torch.full((8,), number, dtype=torch.uint8))
            span = Span(pool="state", offset=8 * (number - 1), size=8)
            pairs = [(span, Span(pool="state", offset=0, size=8))]
            self.sources.append((endpoint(link, name, (pool,)), pairs))

    def post(self) -> Together:
        return Together().post(self.here, self.sources)


def ended(read: Together) -> bool:
    return any(read.poll() for _ in range(20))


def test_it_is_done_when_every_peer_is() -> None:
    meeting = Meeting()
    meeting.fabric.stall("b")
    read = meeting.post()
    assert not ended(read)
    with pytest.raises(RuntimeError, match="in progress"):
        read.release()
    meeting.fabric.resume("b")
    assert ended(read)
    read.release()
    assert meeting.into.tolist() == [1] * 8 + [2] * 8


def test_a_failure_is_told_when_nothing_is_in_progress_any_more() -> None:
    meeting = Meeting()
    meeting.fabric.kill("b")
    meeting.fabric.stall("a")
    read = meeting.post()  # the READ from a is in flight and must not be forgotten
    assert not read.poll()
    meeting.fabric.resume("a")
    with pytest.raises(TransferError, match="agent b is gone"):
        ended(read)
    read.release()


def test_a_first_read_that_is_refused_is_told_at_once() -> None:
    meeting = Meeting()
    meeting.fabric.kill("a")
    with pytest.raises(TransferError, match="agent a is gone"):
        meeting.post()


def test_a_rank_is_a_peer_of_its_own() -> None:
    meeting = Meeting()
    (leader, _), (other, _) = meeting.sources
    agent = Agent(name=other.agent, metadata=other.agent_metadata, pools=other.pools)
    replica = replace(leader, ranks=(agent,))
    assert at_rank(replica, 0) is replica
    one = at_rank(replica, 1)
    assert (one.id, one.agent, one.pools, one.ranks) == ("a/1", "b", other.pools, ())
    with pytest.raises(TransferError, match="has 2 ranks and no rank 2"):
        at_rank(replica, 2)
