"""Axis: what the ranks along one axis of a mesh do together.

An axis is a value that is handed down; there is no default group. Sums are taken in rank order, so
that they depend on the values alone and not on how a library cuts its buffers; every rank gets the
same bits. A lost rank ends the call with RoomLost on all others. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import BackendUnsupported, RoomLost
from common.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class Axis(Protocol):
    """The ranks along one axis, seen from one of them."""

    size: int
    index: int
    recordable: bool  # whether a captured pass may hold its sums and gathers

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's x, in order; all have the shape of x."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, added in fp32 in rank order, rounded once; same dtype."""

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's part of that sum: x [size * N, ...] -> [N, ...]."""

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send rows of x, `send[i]` to rank i in order; `receive[i]` rows come from rank i.

        x [sum(send), ...] -> [sum(receive), ...].
        """

    def begin_all_to_all(
        self, x: Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> Callable[[], Tensor]:
        """The same under way: what is returned waits for its end and has the rows."""


class Solo:
    """An axis of one rank: nothing is sent, and not a bit changes."""

    size, index, recordable = 1, 0, True

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """See `Axis`."""
        return [x]

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Axis`."""
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """See `Axis`."""
        return x

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """See `Axis`."""
        return x

    def begin_all_to_all(
        self, x: Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> Callable[[], Tensor]:
        """See `Axis`."""
        return lambda: x


SOLO = Solo()


class Wired:
    """An axis over a process group of torch.distributed."""

    recordable = False  # gloo's wait for the host; NCCL's were never recorded here

    def __init__(
        self, group: Any, index: int, size: int, ranks: str, *, on_host: bool = True
    ) -> None:
        """`group` joins `size` ranks, this one being `index`; `ranks` names them in errors.

        `on_host`: the group moves host memory; a device's tensors are copied there and back.
        """
        self.size, self.index = size, index
        self._group, self._ranks, self._on_host = group, ranks, on_host

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """See `Axis`."""
        own = self._staged(x)
        out = [torch.empty_like(own) for _ in range(self.size)]
        with self._lost("all-gather"):
            self._group.allgather([out], [own]).wait()
        return [part.to(x.device) for part in out]

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Axis`."""
        return _sum(self.all_gather(x), x.dtype)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """See `Axis`."""
        if len(x) % self.size:
            raise ValueError(f"{len(x)} rows cannot be scattered over {self.size} ranks")
        rows = [len(x) // self.size] * self.size
        return _sum(list(self.all_to_all(x, rows, rows).chunk(self.size)), x.dtype)

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """See `Axis`."""
        return self.begin_all_to_all(x, send, receive)()

    def begin_all_to_all(
        self, x: Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> Callable[[], Tensor]:
        """See `Axis`."""
        own = self._staged(x)
        out = own.new_empty(sum(receive), *x.shape[1:])
        with self._lost("all-to-all"):
            work = self._group.alltoall_base(out, own, list(receive), list(send))

        def wait(sent: Tensor = own) -> Tensor:  # what is being sent lives until then
            with self._lost("all-to-all"):
                work.wait()
            return out.to(x.device)

        return wait

    def _staged(self, x: Tensor) -> Tensor:
        return (x.cpu() if self._on_host else x).contiguous()

    @contextmanager
    def _lost(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RoomLost(
                f"a rank of {self._ranks} is gone or stuck; its {what} failed: {error}"
            ) from error


def open_axes(
    mesh: Mesh, rank: int, store: Store, *, backend: str = "gloo", patience_s: float = 30.0
) -> dict[str, Axis]:
    """Join the groups of a rank along every axis; all ranks of the mesh call this together.

    Args:
        mesh: the layout.
        rank: this process.
        store: reached by all ranks; keys are prefixed by axis and group.
        backend: "gloo" (host memory) or "nccl" (device memory).
        patience_s: how long a collective waits for a rank before the rank counts as lost.

    Raises:
        BackendUnsupported: the backend is unknown or not built into this torch.
        RoomLost: a rank did not come in time.
    """
    axes: dict[str, Axis] = {}
    for axis in ("tensor", "data", "expert"):
        ranks = mesh.group(axis, rank)
        if len(ranks) == 1:
            axes[axis] = SOLO
            continue
        index = ranks.index(rank)
        prefixed = dist.PrefixStore(  # type: ignore[attr-defined]
            f"{axis}/{ranks[0]}", store
        )
        group = _process_group(prefixed, index, len(ranks), backend, patience_s)
        named = f"{axis} group {ranks[0]}-{ranks[-1]}"
        axes[axis] = Wired(group, index, len(ranks), named, on_host=backend == "gloo")
    return axes


def _process_group(
    store: Store, index: int, size: int, backend: str, patience_s: float
) -> Any:  # torch's Backend, whose stubs lack its collectives
    patience = timedelta(seconds=patience_s)
    try:
        if backend == "gloo":
            return dist.ProcessGroupGloo(store, index, size, patience)
        if backend == "nccl" and dist.is_nccl_available():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = patience
            return dist.ProcessGroupNCCL(store, index, size, options)
    except RuntimeError as error:
        raise RoomLost(f"{size} ranks did not meet within {patience_s:g} s: {error}") from error
    raise BackendUnsupported(f"collectives over {backend!r} are not available; use gloo or nccl")


def _sum(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(dtype)
