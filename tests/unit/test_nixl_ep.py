"""NIXL's expert-parallel exchange without its kernels: sizes, refusals, and how ranks meet."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch

from common.errors import BackendUnsupported
from common.ops.exchange.packing import NEW, OLD, kernels_of, packing_of
from common.parallel import nixl_ep_open
from common.parallel.collectives import SOLO
from common.parallel.nixl_ep import NixlEp
from common.parallel.nixl_ep_open import Notes, open_nixl_ep
from common.parallel.placement import even, routes

K3 = {"rows": 64, "top": 16, "width": 3584}
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPES = {"rows": 4, "top": 2, "width": 8, "experts": 2}


def test_k3_travels_whole_with_the_pinned_release_and_in_two_parts_with_the_one_before() -> None:
    assert kernels_of("1.5.1") is NEW and kernels_of("1.4.1") is OLD and kernels_of("2.0.0") is NEW
    new = packing_of(NEW, ranks=8, experts=112, **K3)
    assert (new.parts, new.each, new.wide, new.cap) == (1, 16, 3584, 64)
    old = packing_of(OLD, ranks=8, experts=112, **K3)
    assert (old.parts, old.each, old.wide, old.cap) == (2, 8, 4096, 128)
    assert new.slots == 8 * 64 and old.slots == 8 * 128
    assert new.places == old.places == 8 * 64 * 16  # a row comes once for each choice


def test_few_experts_make_few_places_and_odd_numbers_are_rounded_up() -> None:
    p = packing_of(OLD, ranks=3, rows=5, top=13, width=2049, experts=4)
    assert (p.parts, p.each, p.wide, p.cap, p.places) == (2, 7, 2560, 12, 3 * 5 * 4)


def test_the_buffer_is_twice_what_is_sent_received_and_signalled() -> None:
    asked = {16: 119_276_160, 448: 3_339_729_024}  # of nixl-cu13 1.4.1 for 64 rows over 2 ranks
    for experts, size in asked.items():
        p = packing_of(OLD, ranks=2, experts=experts, rows=64, top=8, width=7168)
        assert p.bytes == size
    p = packing_of(NEW, ranks=2, rows=4, top=4, width=2048, experts=3)
    row, combined = 16 + 4096, 4096 + 16 * 4
    bytes_ = 2 * (6 * 4 * combined + 6 * 4 * combined + 128)
    assert row < combined and p.bytes == (bytes_ + 128) // 128 * 128


def test_what_it_takes_of_a_device_is_told_before_memory_is_taken() -> None:
    p = packing_of(NEW, ranks=8, experts=112, **K3)
    found = nixl_ep_open.reserve(ranks=8, experts=112, **K3)
    assert p.bytes < found < p.bytes + (600 << 20)  # 411 MB of rows as they come, and as they go
    assert 1.6e9 < p.bytes < 1.7e9


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"width": 9000}, r"rows of up to 8192 values, not 9000; set decode\.exchange"),
        ({"ranks": 12}, r"multiple of 8, not 12; take another decode\.expert"),
        ({"rows": 2000}, r"at most 1024 rows .* 2000 rows of 16 .*lower decode\.max_batch to 1024"),
    ],
)
def test_what_the_kernels_do_not_take_is_a_sentence(changed, said) -> None:
    with pytest.raises(BackendUnsupported, match=said):
        packing_of(NEW, **({"ranks": 8, "experts": 112} | K3 | changed))


def test_a_batch_in_parts_is_refused_at_half_the_rows() -> None:
    with pytest.raises(BackendUnsupported, match=r"travel as 1040; .*max_batch to 512"):
        packing_of(OLD, ranks=8, experts=112, **(K3 | {"rows": 520}))


def opened(dtype: torch.dtype = torch.bfloat16):
    return open_nixl_ep(SOLO, **SHAPES, dtype=dtype, device=CUDA)


def test_a_missing_package_another_torch_and_an_old_device_are_named(tmp_path, monkeypatch) -> None:
    class Found:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(nixl_ep_open, "version", lambda package: "1.5.1")
    monkeypatch.setattr(nixl_ep_open, "find_spec", lambda module: None)
    with pytest.raises(BackendUnsupported, match=r"needs the module nixl_ep_cu13 .*nixl-cu13=="):
        opened()
    monkeypatch.setattr(nixl_ep_open, "find_spec", lambda module: Found)
    for torch_known in ("19", "110"):
        (tmp_path / f"nixl_ep_cpp_torch2{torch_known}.cpython-312-x86_64-linux-gnu.so").touch()
    with pytest.raises(
        BackendUnsupported, match=r"1\.5\.1 has kernels for torch 2\.110, 2\.19, and"
    ):
        opened()
    here = "".join(torch.__version__.split(".")[:2])
    (tmp_path / f"nixl_ep_cpp_torch{here}.cpython-312-x86_64-linux-gnu.so").touch()
    with pytest.raises(BackendUnsupported, match="SM90 and later, and this device is SM80"):
        opened()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(BackendUnsupported, match=r"moves bfloat16, not torch\.float32"):
        opened(torch.float32)


def test_more_experts_than_a_device_has_warps_for_are_refused(monkeypatch) -> None:
    found = Mock(multi_processor_count=132)
    monkeypatch.setattr(nixl_ep_open, "_release", lambda device: "1.5.1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    with pytest.raises(BackendUnsupported, match=r"takes 1848 places .* not 1849; lower"):
        open_nixl_ep(SOLO, **(SHAPES | {"experts": 1849}), dtype=torch.bfloat16, device=CPU)


def test_a_batch_beyond_the_buffer_is_refused_before_anything_is_sent() -> None:
    p = packing_of(NEW, ranks=1, **SHAPES)
    exchange = NixlEp(Mock(), 0, p, CPU)
    rows, keep = torch.zeros(5, 8, dtype=torch.bfloat16), torch.ones(5, dtype=torch.bool)
    ids = torch.zeros(5, 2, dtype=torch.int64)
    with pytest.raises(BackendUnsupported, match=r"5 rows exceed .* registered for 4; raise"):
        exchange.dispatch(rows, ids, keep, routes(even(2, 1), 2, "cpu"))


class Threads:
    """An axis whose ranks are threads."""

    def __init__(self, index: int, size: int, words: dict, barrier: threading.Barrier) -> None:
        self.index, self.size, self._words, self._barrier = index, size, words, barrier

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._words[self.index] = x.clone()
        self._barrier.wait()
        found = [self._words[rank] for rank in range(self.size)]
        self._barrier.wait()
        return found


def test_ranks_tell_each_other_words_of_any_length() -> None:
    words, barrier = {}, threading.Barrier(3, timeout=10)

    def rank(index: int) -> list[bytes]:
        notes = Notes(Threads(index, 3, words, barrier), CPU)  # type: ignore[arg-type]
        notes.set(f"NIXL_EP/{index}", bytes([index]) * (5 + 2 * index))
        others = [f"NIXL_EP/{other}" for other in range(3) if other != index]
        notes.wait(others, timedelta(seconds=1))
        return notes.multi_get(others)

    with ThreadPoolExecutor(3) as pool:
        told = list(pool.map(rank, range(3)))
    assert told == [
        [b"\1" * 7, b"\2" * 9],
        [b"\0" * 5, b"\2" * 9],
        [b"\0" * 5, b"\1" * 7],
    ]
