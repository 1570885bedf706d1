"""Opening NIXL's expert-parallel exchange: what must fit, how ranks meet, what memory it takes.

Ranks here make none of torch's process groups that others could use; what the package would ask
of a store goes over the axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from common.errors import BackendUnsupported
from common.ops.exchange.packing import kernels_of, packing_of
from common.parallel import nixl_ep
from common.parallel.collectives import Axis
from common.parallel.nixl_ep import INSTEAD, MODULE, PACKAGE, NixlEp

HOPPER = 9  # compute capability that the kernels are for, and later ones
EXPERTS_PER_SM = 14  # a multiprocessor's warps are divided among its experts
WORKSPACE = 32 << 20  # bytes that the package takes for itself


class Notes:
    """What the package asks of a store, over an axis: each rank's word, known to all."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        """`device` is where the axis takes tensors from."""
        self._axis, self._device = axis, device
        self._known: list[bytes] = []

    def set(self, key: str, word: bytes) -> None:
        """Tell the word to all ranks, which call this together."""
        length = torch.tensor([len(word)], device=self._device)
        lengths = [int(one) for one in self._axis.all_gather(length)]
        own = torch.zeros(max(lengths), dtype=torch.uint8)
        own[: len(word)] = torch.frombuffer(bytearray(word), dtype=torch.uint8)
        told = self._axis.all_gather(own.to(self._device))
        self._known = [bytes(one[:n].cpu().tolist()) for one, n in zip(told, lengths, strict=True)]

    def wait(self, keys: Sequence[str], patience: timedelta) -> None:
        """Nothing to wait for: all words came together."""

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The words of the ranks that end the keys: "NIXL_EP/3"."""
        return [self._known[int(key.rsplit("/", 1)[1])] for key in keys]

    def delete_key(self, key: str) -> None:
        """Nothing is kept."""


def open_nixl_ep(
    axis: Axis, *, rows: int, top: int, width: int, dtype: torch.dtype, experts: int,
    device: torch.device,
) -> NixlEp:  # fmt: skip
    """Register memory and connect to all ranks of the axis, which call this together.

    Raises:
        BackendUnsupported: the package, torch, the device, or the sizes do not fit, or UCX found
            no way between two ranks that its kernels can take.
    """
    release = _release(device)
    if dtype != torch.bfloat16:
        raise BackendUnsupported(f'exchange "nixl_ep" moves bfloat16, not {dtype}; {INSTEAD}')
    most = max(int(n) for n in axis.all_gather(torch.tensor([experts], device=device)))
    p = packing_of(
        kernels_of(release), ranks=axis.size, rows=rows, top=top, width=width, experts=most
    )
    bound = EXPERTS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
    if p.ranks * p.experts > bound:
        raise BackendUnsupported(
            f'exchange "nixl_ep" takes {bound} places for experts on this device, not '
            f"{p.ranks * p.experts}; lower decode.spare_experts, or {INSTEAD}"
        )
    library = import_module(MODULE)
    asked = library.Buffer.get_rdma_size_hint(p.cap, p.wide, p.ranks, p.ranks * p.experts)
    try:
        buffer = library.Buffer(
            rank=axis.index,
            explicitly_destroy=True,
            tcp_store_group=Notes(axis, device),
            timeout_ms=nixl_ep.TIMEOUT_MS,
        )
        buffer.update_memory_buffers(p.ranks, p.experts, asked)
        buffer.connect_ranks([rank for rank in range(p.ranks) if rank != axis.index])
    except RuntimeError as error:
        raise BackendUnsupported(
            f'exchange "nixl_ep" could not connect {p.ranks} ranks: {error}; UCX_LOG_LEVEL=info '
            f"says which transports it tried; {INSTEAD}"
        ) from error
    if asked != p.bytes:
        raise BackendUnsupported(
            f'exchange "nixl_ep": {PACKAGE} {release} lays its buffer otherwise ({asked} bytes, '
            f"not {p.bytes}); install {PACKAGE}==1.5.1, or {INSTEAD}"
        )
    made = NixlEp(buffer, axis.index, p, device)
    made.prove()
    return made


def reserve(*, ranks: int, rows: int, top: int, width: int, experts: int) -> int:
    """Bytes of a rank's device that the exchange takes: what is registered, and one pass's rows.

    Args:
        ranks: that hold every expert once.
        rows: most of a rank in one pass.
        top: choices of a row.
        width: values of a row.
        experts: places of a rank's share.

    Raises:
        BackendUnsupported: as of `packing_of`.
    """
    p = packing_of(
        kernels_of(version(PACKAGE)), ranks=ranks, rows=rows, top=top, width=width, experts=experts
    )
    came = 2 * p.experts * p.slots * p.wide
    return p.bytes + came + 2 * 2 * p.places * p.width + WORKSPACE


def _release(device: torch.device) -> str:
    """The package's version, when it can run here."""
    if device.type != "cuda":
        raise BackendUnsupported(
            f'exchange "nixl_ep" is for CUDA devices, and the model is on {device.type}; set '
            'decode.exchange = "all_to_all"'
        )
    found = find_spec(MODULE)
    if found is None or not found.submodule_search_locations:
        raise BackendUnsupported(
            f'exchange "nixl_ep" needs the module {MODULE} of {PACKAGE}; install '
            f"{PACKAGE}==1.5.1, or {INSTEAD}"
        )
    files = Path(found.submodule_search_locations[0]).glob("nixl_ep_cpp_torch*.so")
    built = sorted(file.name.split(".")[0].removeprefix("nixl_ep_cpp_torch") for file in files)
    here = "".join(torch.__version__.split(".")[:2])
    release = version(PACKAGE)
    if here not in built:
        known = ", ".join(f"{one[0]}.{one[1:]}" for one in built)
        raise BackendUnsupported(
            f'exchange "nixl_ep": {PACKAGE} {release} has kernels for torch {known}, and this is '
            f"torch {torch.__version__}; install one of these, or {INSTEAD}"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major < HOPPER:
        raise BackendUnsupported(
            f'exchange "nixl_ep" is for SM90 and later, and this device is SM{major}{minor}; '
            f"{INSTEAD}"
        )
    return release
