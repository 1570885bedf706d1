"""LocalLink: the promises of `link.py` inside one process, for unit tests only; rooms speak NIXL.

A Fabric joins the links of one test. It can stall an agent (reads of its memory stay in progress)
and kill one, so that every ending of a READ can be met without a network.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from common.contract.messages import Endpoint
from common.contract.regions import PoolInfo
from common.errors import TransferError
from common.transfer.link import Pair, Read, pool_of


class Fabric:
    """The memory of all agents of one test, and which of them answer."""

    def __init__(self) -> None:
        """Start with nobody."""
        self.memory: dict[tuple[str, str], torch.Tensor] = {}  # (agent, pool): uint8 [size]
        self.stalled: set[str] = set()
        self.dead: set[str] = set()
        self.lock = threading.RLock()

    def stall(self, agent: str) -> None:
        """Stop answering for `agent`."""
        self.stalled.add(agent)

    def resume(self, agent: str) -> None:
        """Answer again."""
        self.stalled.discard(agent)

    def kill(self, agent: str) -> None:
        """End the agent: reads of it fail and its memory is gone."""
        with self.lock:
            self.dead.add(agent)
            for key in [key for key in self.memory if key[0] == agent]:
                del self.memory[key]


class LocalLink:
    """One agent of a Fabric."""

    def __init__(self, agent: str, fabric: Fabric) -> None:
        """Join `fabric` as `agent`; a killed agent of that name is replaced."""
        self.agent = agent
        self._fabric = fabric
        self._pools: list[PoolInfo] = []
        self._peers: dict[str, Endpoint] = {}
        fabric.dead.discard(agent)

    def metadata(self) -> bytes:
        """The agent's name."""
        return self.agent.encode()

    def register(self, name: str, tensor: torch.Tensor) -> PoolInfo:
        """Make a tensor readable under `name`."""
        if any(pool.name == name for pool in self._pools):
            raise TransferError(f"pool `{name}` is registered already")
        if not tensor.is_contiguous():
            raise TransferError(f"pool `{name}` is not contiguous; register the whole pool")
        flat = tensor.view(-1).view(torch.uint8)
        info = PoolInfo(name=name, address=tensor.data_ptr(), size=flat.numel(), device=-1)
        self._fabric.memory[self.agent, name] = flat
        self._pools.append(info)
        return info

    def connect(self, peer: Endpoint) -> None:
        """Learn a peer by (id, epoch)."""
        known = self._peers.get(peer.id)
        if known is not None and peer.epoch < known.epoch:
            raise TransferError(
                f"peer {peer.id} is known in epoch {known.epoch}; {peer.epoch} is older"
            )
        if peer.agent_metadata != peer.agent.encode():
            raise TransferError(f"the metadata of peer {peer.id} is not agent {peer.agent}'s")
        self._peers[peer.id] = peer

    def forget(self, peer_id: str) -> None:
        """Drop a peer."""
        self._peers.pop(peer_id, None)

    def read(self, peer: Endpoint, pairs: Sequence[Pair]) -> Read:
        """Post one READ; bytes move while it is polled."""
        known = self._peers.get(peer.id)
        if known is None or known.epoch != peer.epoch:
            raise TransferError(f"peer {peer.id} is not connected in epoch {peer.epoch}")
        copies: list[tuple[torch.Tensor, tuple[str, str], int, int]] = []
        for local, remote in pairs:
            pool_of(self._pools, local, self.agent)
            pool_of(peer.pools, remote, peer.id)
            if local.size != remote.size:
                raise TransferError(f"a pair reads {remote.size} bytes into {local.size}")
            target = self._fabric.memory[self.agent, local.pool][
                local.offset : local.offset + local.size
            ]
            copies.append((target, (peer.agent, remote.pool), remote.offset, remote.size))
        if peer.agent in self._fabric.dead:
            raise TransferError(f"agent {peer.agent} is gone")
        return _LocalRead(self._fabric, peer.agent, copies)


class _LocalRead:
    def __init__(
        self,
        fabric: Fabric,
        agent: str,
        copies: list[tuple[torch.Tensor, tuple[str, str], int, int]],
    ) -> None:
        self._fabric, self._agent = fabric, agent
        self._left = copies
        self._ended = False

    def poll(self) -> bool:
        with self._fabric.lock:
            if self._ended:
                return True
            if self._agent in self._fabric.dead:
                self._ended = True
                raise TransferError(f"agent {self._agent} is gone")
            if self._agent in self._fabric.stalled:
                return False
            for target, key, offset, size in self._left:
                target.copy_(self._fabric.memory[key][offset : offset + size])
            self._ended = True
            return True

    def release(self) -> None:
        if not self._ended:
            raise RuntimeError("a READ in progress cannot be released")
