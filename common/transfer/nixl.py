"""NixlLink: the promises of `link.py` over NIXL. The only file that speaks NIXL.

Measured facts it stands on: copies between processes of one host happen inside `transfer`, those
over tcp after it returned; a dead peer raises, a stopped one stays in progress for ever;
a READ goes on after its handle was released, its agent removed and its memory deregistered.
Hence no handle is released while in progress. NIXL's errors become TransferError here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from common.contract.messages import Endpoint
from common.contract.regions import PoolInfo
from common.errors import TransferError
from common.transfer.link import Pair, Read, pool_of

PROGRESS_US = 1000  # pause of an agent's progress thread between two rounds
# Without a visible NVLink UCX's default refuses READs of device memory through CUDA IPC, also on
# one device, and stages them through the host over tcp: 1.05 s for 676 MB on one H200.
READS_BETWEEN_DEVICES = ("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")
_STARTING = threading.Lock()


class NixlLink:
    """One NIXL agent with its UCX backend."""

    def __init__(self, agent: str, *, transports: str = "", log_level: str = "WARN") -> None:
        """Start the agent.

        Args:
            agent: its name, unique among the rooms of a deployment and in time.
            transports: UCX's list of transports, for example "tcp"; empty leaves the choice to UCX.
                Process-wide, and only effective before the process's first agent.
            log_level: NIXL's and UCX's log level.
        """
        os.environ["NIXL_LOG_LEVEL"] = log_level
        os.environ.setdefault("UCX_LOG_LEVEL", log_level.lower())
        if torch.cuda.is_available():  # elsewhere UCX complains of it, on standard output
            os.environ.setdefault(*READS_BETWEEN_DEVICES)
        if transports:
            os.environ["UCX_TLS"] = transports
        api = _load()
        self.agent = agent
        self._lock = threading.RLock()
        self._pools: list[PoolInfo] = []
        self._tensors: list[torch.Tensor] = []  # registered memory must outlive the agent
        self._peers: dict[str, Endpoint] = {}
        with _translated(f"agent {agent} could not be started"):
            # Strict: transfer threads, the sweeper and the control plane share the agent.
            config = api.nixl_agent_config(
                backends=["UCX"], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            )
            with _calm_progress(api):
                self._nixl: Any = api.nixl_agent(agent, config)

    def metadata(self) -> bytes:
        """The agent's NIXL metadata with all pools registered so far."""
        with _translated("metadata could not be read"):
            return bytes(self._nixl.get_agent_metadata())

    def register(self, name: str, tensor: torch.Tensor) -> PoolInfo:
        """Register a whole pool."""
        if any(pool.name == name for pool in self._pools):
            raise TransferError(f"pool `{name}` is registered already")
        if not tensor.is_contiguous():
            raise TransferError(f"pool `{name}` is not contiguous; register the whole pool")
        size = tensor.numel() * tensor.element_size()
        device = tensor.device.index or 0 if tensor.is_cuda else -1
        info = PoolInfo(name=name, address=tensor.data_ptr(), size=size, device=device)
        with self._lock, _translated(f"pool `{name}` of {size} bytes could not be registered"):
            rows = [(info.address, size, max(device, 0), name)]
            self._nixl.register_memory(rows, _memory(info))
            self._tensors.append(tensor)
            self._pools.append(info)
        return info

    def connect(self, peer: Endpoint) -> None:
        """Load a peer's metadata, once an epoch."""
        with self._lock:
            known = self._peers.get(peer.id)
            if known is not None and known.epoch == peer.epoch:
                return
            if known is not None and known.epoch > peer.epoch:
                raise TransferError(
                    f"peer {peer.id} is known in epoch {known.epoch}; {peer.epoch} is older"
                )
            self.forget(peer.id)
            with _translated(f"peer {peer.id} could not be connected"):
                name = self._nixl.add_remote_agent(peer.agent_metadata)
            name = name.decode() if isinstance(name, bytes) else str(name)
            if name != peer.agent:
                raise TransferError(
                    f"the metadata of peer {peer.id} names agent {name}, not {peer.agent}"
                )
            self._peers[peer.id] = peer

    def forget(self, peer_id: str) -> None:
        """Drop a peer's metadata."""
        with self._lock:
            known = self._peers.pop(peer_id, None)
            if known is None:
                return
            try:
                with _translated("already gone"):
                    self._nixl.remove_remote_agent(known.agent)
            except TransferError:
                return  # a dead peer may have been dropped by NIXL itself

    def read(self, peer: Endpoint, pairs: Sequence[Pair]) -> Read:
        """Post one READ; pairs of different kinds of memory travel under one handle each."""
        with self._lock:
            known = self._peers.get(peer.id)
        if known is None or known.epoch != peer.epoch:
            raise TransferError(f"peer {peer.id} is not connected in epoch {peer.epoch}")
        groups: dict[
            tuple[str, str], tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]
        ] = {}
        for local, remote in pairs:
            mine, theirs = (
                pool_of(self._pools, local, self.agent),
                pool_of(peer.pools, remote, peer.id),
            )
            if local.size != remote.size:
                raise TransferError(f"a pair reads {remote.size} bytes into {local.size}")
            here, there = groups.setdefault((_memory(mine), _memory(theirs)), ([], []))
            here.append((mine.address + local.offset, local.size, max(mine.device, 0)))
            there.append((theirs.address + remote.offset, remote.size, max(theirs.device, 0)))
        read = _NixlRead(self._nixl)
        for (mine_kind, theirs_kind), (here, there) in groups.items():
            read.post(known.agent, (mine_kind, here), (theirs_kind, there))
        return read


class _NixlRead:
    """One or more handles that end together."""

    def __init__(self, nixl: Any) -> None:
        self._nixl = nixl
        self._open: list[Any] = []  # in progress
        self._ended: list[Any] = []
        self._failure: TransferError | None = None

    def post(self, agent: str, here: tuple[str, list[Any]], there: tuple[str, list[Any]]) -> None:
        """Post one handle. A failure after an earlier handle was posted is reported by `poll`."""
        if self._failure is not None:
            return
        try:
            with _translated(f"a READ from {agent} was refused"):
                mine = self._nixl.get_xfer_descs(here[1], here[0])
                theirs = self._nixl.get_xfer_descs(there[1], there[0])
                handle = self._nixl.initialize_xfer("READ", mine, theirs, agent)
        except TransferError as failure:
            self._fail(failure)
            return
        try:
            with _translated(f"a READ from {agent} failed"):
                state = self._nixl.transfer(handle)
        except TransferError as failure:
            self._ended.append(handle)
            self._fail(failure)
            return
        self._note(handle, state, agent)

    def poll(self) -> bool:
        """True when all handles are done; raises only when none is in progress any more."""
        still, self._open = self._open, []
        for handle in still:
            try:
                with _translated("a READ failed"):
                    state = self._nixl.check_xfer_state(handle)
            except TransferError as failure:
                self._ended.append(handle)
                self._failure = self._failure or failure
                continue
            self._note(handle, state, "the peer")
        if self._open:
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def release(self) -> None:
        """Release every handle."""
        if self._open:
            raise RuntimeError("a READ in progress cannot be released")
        ended, self._ended = self._ended, []
        for handle in ended:
            try:
                with _translated("not released"):
                    self._nixl.release_xfer_handle(handle)
            except TransferError:
                continue  # the agent keeps it and tries again when it ends

    def _note(self, handle: Any, state: str, agent: str) -> None:
        if state == "PROC":
            self._open.append(handle)
            return
        self._ended.append(handle)
        if state != "DONE":
            self._failure = self._failure or TransferError(
                f"a READ from {agent} ended in state {state}"
            )

    def _fail(self, failure: TransferError) -> None:
        if not self._open:
            self.release()
            raise failure
        self._failure = failure


def _memory(pool: PoolInfo) -> str:
    return "DRAM" if pool.device < 0 else "VRAM"


def _load() -> ModuleType:
    """Import NIXL's Python interface: the CUDA 13 variant, or the plain name."""
    reasons = []
    for name in ("nixl_cu13._api", "nixl._api"):
        try:
            return import_module(name)
        except ImportError as error:
            reasons.append(str(error))
    raise TransferError(f"NIXL cannot be imported ({'; '.join(reasons)}); install nixl-cu13==1.5.1")


@contextmanager
def _calm_progress(api: ModuleType) -> Iterator[None]:
    """Let the progress thread of the agent made inside sleep between its rounds.

    NIXL's Python class sets the pause to 0 and offers no argument: the thread then takes 0.8 of a
    core for ever, in every room. With 1 ms it takes 0.02; 64 MB over tcp 79 ms instead of 72, and
    copies on one host the same (measured on 2 cores).
    """
    bindings, make = api.nixlBind, api.nixlBind.nixlAgent

    def calm(name: str, config: Any) -> Any:
        config.pthrDelay = PROGRESS_US
        return make(name, config)

    with _STARTING:
        bindings.nixlAgent = calm
        try:
            yield
        finally:
            bindings.nixlAgent = make


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Turn NIXL's exceptions, which have no public base class, into TransferError."""
    try:
        yield
    except Exception as error:
        if type(error).__name__.startswith("nixl") or isinstance(
            error, (RuntimeError, ValueError, TypeError)
        ):
            name = type(error).__name__
            failure = TransferError(f"{what}: {name} {error}")
            failure.library = name.removeprefix("nixl").removesuffix("Error")
            raise failure from error
        raise
