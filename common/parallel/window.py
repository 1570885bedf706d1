"""Window: device memory of every rank of an axis that all of them may write into.

For ranks on one host, each a process of its own, on one device or on several that reach each other:
CUDA's handles of device memory travel along the axis. The driver is called through its C interface;
torch has no public way to share memory outside its own processes. A handle names memory, not a
number of a device, so ranks may each see their own device alone, as under Ray, where the driver
opens handles of devices that a process does not see; where it does not, it is told which.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import BackendUnsupported
from common.parallel.collectives import Axis

HANDLE = 64  # bytes of a handle
NAME = 36  # letters of a device's UUID
PEER_ACCESS = 1  # opening a handle lets this device reach the other
BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a host


class _Handle(ctypes.Structure):
    _fields_ = (("raw", ctypes.c_ubyte * HANDLE),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One rank's memory, and where it sees every rank's."""

    own: Tensor  # uint8 [size]; kept as long as others may write
    addresses: Tensor  # int64 [ranks], on the device; this rank's own among them


def open_window(axis: Axis, size: int, device: torch.device) -> Window:
    """Share `size` zeroed bytes of each rank with all others; all ranks call this together.

    Raises:
        BackendUnsupported: the ranks are on several hosts, have no CUDA device, or one device
            cannot reach another's memory.
    """
    if device.type != "cuda":
        raise BackendUnsupported(
            f'exchange "direct" writes into the memory of CUDA devices, and the model is on '
            f'{device.type}; set exchange = "all_to_all"'
        )
    own = torch.zeros(size, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    driver = ctypes.CDLL("libcuda.so.1")
    handle, offset = _handle_of(driver, own)
    host = hashlib.blake2b(BOOT.read_bytes(), digest_size=8).digest()
    name = str(torch.cuda.get_device_properties(device).uuid).encode().ljust(NAME)
    word = torch.frombuffer(
        bytearray(host + name + handle + offset.to_bytes(8, "little")), dtype=torch.uint8
    )
    told = [bytes(part.cpu().tolist()) for part in axis.all_gather(word.to(device))]
    strangers = [rank for rank, other in enumerate(told) if other[:8] != host]
    if strangers:
        raise BackendUnsupported(
            f'exchange "direct" is for ranks of one host, and ranks {strangers} of an expert group '
            'are on another; set exchange = "all_to_all"'
        )
    addresses = [
        own.data_ptr() if rank == axis.index else _opened(driver, other[8:], rank, device)
        for rank, other in enumerate(told)
    ]
    return Window(own=own, addresses=torch.tensor(addresses, device=device))


def _handle_of(driver: Any, own: Tensor) -> tuple[bytes, int]:
    """The handle of the allocation that a tensor lies in, and where in it."""
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    at = ctypes.c_uint64(own.data_ptr())
    _check(driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), at), "found")
    _check(driver.cuIpcGetMemHandle(ctypes.byref(handle), base), "shared")
    return bytes(handle.raw), own.data_ptr() - base.value


def _opened(driver: Any, told: bytes, rank: int, device: torch.device) -> int:
    name, handle = told[:NAME].decode().strip(), _Handle.from_buffer_copy(told[NAME:][:HANDLE])
    base = ctypes.c_uint64()
    code = driver.cuIpcOpenMemHandle_v2(ctypes.byref(base), handle, ctypes.c_uint(PEER_ACCESS))
    if code:
        seen = {
            str(torch.cuda.get_device_properties(number).uuid): number
            for number in range(torch.cuda.device_count())
        }
        raise BackendUnsupported(_unreached(rank, name, code, seen, device))
    return base.value + int.from_bytes(told[NAME + HANDLE :], "little")


def _unreached(
    rank: int, name: str, code: int, seen: Mapping[str, int], device: torch.device
) -> str:
    """Why memory of a rank's device cannot be written; `seen`: what this process sees, by UUID."""
    said = f'exchange "direct": memory of rank {rank} on device {name} could not be reached (CUDA '
    said += f"error {code})"
    other = seen.get(name)
    if other is None:
        said += (
            ", and that device is hidden from this process; let every rank see all devices of its "
            "host (CUDA_VISIBLE_DEVICES, and in containers their device files)"
        )
    elif other != (device.index or 0) and not torch.cuda.can_device_access_peer(device, other):
        said += "; this process's device has no peer access to it"
    return said + ', or set exchange = "all_to_all"'


def _check(code: int, what: str) -> None:
    if code:
        raise BackendUnsupported(
            f'exchange "direct": device memory could not be {what} (CUDA error {code}); leave '
            "expandable segments out of PYTORCH_ALLOC_CONF, whose memory has no handle, or set "
            'exchange = "all_to_all"'
        )
