"""Link: how one process reads another's registered memory, and what it promises.

1. A pool is registered once, whole. Spans name pools, never addresses.
2. A READ is posted between connected peers only; a wrong range or a length mismatch is refused
   before any byte moves.
3. A READ ends in exactly two ways: `poll` returns True (every byte is here) or raises
   TransferError (no more bytes will come). Until then its destination is its own, whatever became
   of the request, and its handle is not released: giving up does not stop a READ.
4. A peer is known by (id, epoch). Connecting to a newer epoch forgets the older; an older one is
   refused.

`read` may copy all bytes before it returns (memory of the same host), so it never runs on an
event loop. What the bytes mean is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from msgspec.structs import replace

from common.contract.messages import Endpoint
from common.contract.regions import PoolInfo, Span
from common.errors import TransferError

Pair = tuple[Span, Span]  # (local, remote), of equal size
Source = tuple[Endpoint, Sequence[Pair]]  # what is READ from one peer


class Read(Protocol):
    """One READ in flight."""

    def poll(self) -> bool:
        """True when every byte has arrived, False while it is in progress.

        Raises:
            TransferError: it failed, and nothing more will arrive.
        """

    def release(self) -> None:
        """Let go of the handle. Only after the end that `poll` reported; before, RuntimeError."""


class Together:
    """READs from several peers as one: it ends when none is in progress any more."""

    def __init__(self) -> None:
        """Start without any."""
        self._open: list[Read] = []
        self._ended: list[Read] = []
        self._failure: TransferError | None = None

    def post(self, link: Link, sources: Iterable[Source]) -> Together:
        """Post one READ a peer.

        Raises:
            TransferError: one was refused, and none is in progress. Where others are, the refusal
                is what `poll` raises when they ended.
        """
        try:
            for peer, pairs in sources:
                link.connect(peer)
                self._open.append(link.read(peer, pairs))
        except TransferError as failure:
            if not self._open:
                raise
            self._failure = failure
        return self

    def poll(self) -> bool:
        """See `Read`."""
        waiting, self._open = self._open, []
        for read in waiting:
            try:
                (self._ended if read.poll() else self._open).append(read)
            except TransferError as failure:
                self._ended.append(read)
                self._failure = self._failure or failure
        if self._open:
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def release(self) -> None:
        """See `Read`."""
        if self._open:
            raise RuntimeError("a READ in progress cannot be released")
        ended, self._ended = self._ended, []
        for read in ended:
            read.release()


class Link(Protocol):
    """One agent of one process. Safe to call from any thread."""

    agent: str

    def metadata(self) -> bytes:
        """What a peer needs to connect; taken after all pools are registered."""

    def register(self, name: str, tensor: torch.Tensor) -> PoolInfo:
        """Make a contiguous tensor readable by peers under `name`, once; keeps the tensor alive.

        Raises:
            TransferError: the name is taken, the tensor is not contiguous, or NIXL cannot take it.
        """

    def connect(self, peer: Endpoint) -> None:
        """Learn a peer; no effect when it is known in this epoch, and drops an older epoch.

        Raises:
            TransferError: the epoch is older than the known one, or the metadata is another's.
        """

    def forget(self, peer_id: str) -> None:
        """Drop a peer; unknown ones are ignored. READs in flight are not stopped by it."""

    def read(self, peer: Endpoint, pairs: Sequence[Pair]) -> Read:
        """Post one READ of all pairs.

        Raises:
            TransferError: not connected in this epoch, a span outside its pool, a pair of unequal
                sizes, or the transport refused.
        """


def at_rank(replica: Endpoint, rank: int) -> Endpoint:
    """One rank of a replica as a peer of its own; rank 0 is the leader, whose endpoint it is.

    Raises:
        TransferError: the replica has no such rank.
    """
    if rank == 0:
        return replica
    if not 0 < rank <= len(replica.ranks):
        raise TransferError(f"{replica.id} has {1 + len(replica.ranks)} ranks and no rank {rank}")
    agent = replica.ranks[rank - 1]
    return replace(
        replica,
        id=f"{replica.id}/{rank}",
        agent=agent.name,
        agent_metadata=agent.metadata,
        pools=agent.pools,
        ranks=(),
    )


def pool_of(pools: Iterable[PoolInfo], span: Span, whose: str) -> PoolInfo:
    """The pool a span lies in.

    Raises:
        TransferError: there is no such pool, or the span reaches outside it.
    """
    for pool in pools:
        if pool.name == span.pool:
            if span.offset < 0 or span.size <= 0 or span.offset + span.size > pool.size:
                raise TransferError(
                    f"span {span.offset}+{span.size} lies outside pool `{span.pool}` of {whose},"
                    f" which has {pool.size} bytes"
                )
            return pool
    raise TransferError(f"{whose} has no pool `{span.pool}`")


def pair_spans(local: Iterable[Span], remote: Iterable[Span]) -> list[Pair]:
    """Cut two lists of spans, of equal total size, into pairs of equal size, in order.

    Raises:
        TransferError: the totals differ.
    """
    pairs: list[Pair] = []
    mine, theirs = list(local)[::-1], list(remote)[::-1]
    while mine and theirs:
        left, right = mine.pop(), theirs.pop()
        size = min(left.size, right.size)
        pairs.append((part_of(left, 0, size), part_of(right, 0, size)))
        if left.size > size:
            mine.append(part_of(left, size, left.size - size))
        if right.size > size:
            theirs.append(part_of(right, size, right.size - size))
    if mine or theirs:
        raise TransferError("local and remote spans differ in total size; nothing was read")
    return pairs


def part_of(span: Span, at: int, size: int) -> Span:
    """`size` bytes of a span from its byte `at` on."""
    return Span(pool=span.pool, offset=span.offset + at, size=size)
