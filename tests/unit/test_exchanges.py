"""Which exchange can run where: a body, or a sentence that says why not and what to set."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from common.errors import BackendUnsupported
from common.ops.exchange import Layout
from common.parallel.choice import EXCHANGES, open_exchange
from common.parallel.collectives import SOLO
from common.parallel.direct import Direct
from common.parallel.exchange import AllToAll
from common.parallel.placement import even, routes
from common.parallel.window import HANDLE, NAME, Window, _opened

SHAPES = {"rows": 4, "top": 2, "width": 8, "experts": 2, "dtype": torch.float32}
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def opened(name: str, device: torch.device = CPU):
    return open_exchange(name, SOLO, **SHAPES, device=device)


def test_the_definition_runs_anywhere() -> None:
    assert isinstance(opened("all_to_all"), AllToAll)


@pytest.mark.parametrize("name", EXCHANGES[1:])
def test_on_a_cpu_the_others_are_refused(name) -> None:
    with pytest.raises(BackendUnsupported, match=r'model is on cpu.*set .*xchange = "all_to_all"'):
        opened(name)


def test_deep_ep_says_beside_what_its_package_loads() -> None:
    with pytest.raises(
        BackendUnsupported, match=r"no body: .*torch 2\.14\.1 .*NCCL 2\.29 .*NVSHMEM 3"
    ):
        opened("deep_ep", CUDA)


def test_mega_moe_says_which_hardware_it_is_for(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(BackendUnsupported, match=r"SM100 \(B200, B300\), and this device is SM90"):
        opened("mega_moe", CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    with pytest.raises(BackendUnsupported, match=r"no body: its buffer wants .*process groups"):
        opened("mega_moe", CUDA)


def test_an_unknown_exchange_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BackendUnsupported, match="'other' is unknown; use all_to_all, direct"):
        opened("other")


class Driver:
    """Opens no handle."""

    def cuIpcOpenMemHandle_v2(self, base, handle, flags) -> int:
        return 201


@pytest.mark.parametrize(
    ("seen", "reaches", "sentence"),
    [
        (["mine"], True, "hidden from this process; let every rank see all devices of its host"),
        (["mine", "theirs"], False, "has no peer access to it, or set"),
        (["mine", "theirs"], True, r"reached \(CUDA error 201\), or set"),
        (["theirs"], False, r"reached \(CUDA error 201\), or set"),  # a device of both
    ],
)
def test_memory_that_cannot_be_reached_is_told_with_the_reason(
    seen, reaches, sentence, monkeypatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=seen[number])
    )
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: reaches)
    told = b"theirs".ljust(NAME) + bytes(HANDLE + 8)
    with pytest.raises(BackendUnsupported, match=f"memory of rank 3 on device theirs.*{sentence}"):
        _opened(Driver(), told, 3, torch.device("cuda:0"))


def test_a_batch_beyond_the_window_is_refused_before_anything_is_sent() -> None:
    layout = Layout(ranks=1, places=8, width=8, dtype=torch.float32)
    window = Window(
        own=torch.zeros(layout.size, dtype=torch.uint8), addresses=torch.zeros(1, dtype=torch.int64)
    )
    direct = Direct(0, window, layout, experts=2)
    rows, keep = torch.zeros(5, 8), torch.ones(5, dtype=torch.bool)
    ids = torch.zeros(5, 2, dtype=torch.int64)
    with pytest.raises(BackendUnsupported, match=r"5 rows of 2 choices exceed .* window of 8"):
        direct.dispatch(rows, ids, keep, routes(even(2, 1), 2, "cpu"))
