"""Pools at the release's size on a device: offsets beyond 2^32 elements, READs between agents."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from common.cache.kda_pool import StatePool
from common.cache.mla_pool import LatentPool
from common.contract.regions import Span
from common.transfer.digest import digest_latents, digest_slot
from tests.support.wire import DTYPE, SPEC, endpoint

pytestmark = pytest.mark.gpu

RELEASE = dataclasses.replace(
    SPEC,
    kda=dataclasses.replace(SPEC.kda, num_heads=96, head_dim=128),
    mla=dataclasses.replace(SPEC.mla, kv_lora_rank=512, rope_dim=64),
    kda_layers=tuple(range(69)),
    mla_layers=tuple(range(69, 93)),
)


def bytes_at(tensor: torch.Tensor, span: Span) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)[span.offset : span.offset + span.size]


@pytest.mark.parametrize("border", [1 << 31, 1 << 32])
def test_a_slot_beyond_the_border_is_signed_copied_and_named_like_any_other(border):
    elements = 69 * 96 * 128 * 128
    far = border // elements + 1
    pool = StatePool(RELEASE, far + 1, dtype=DTYPE, device="cuda")
    pool.state[far].normal_()
    pool.conv[far].normal_()
    pool.copy(far, 0)
    assert far * elements > border
    assert pool.sign(0) == pool.sign(far)
    for kind, span in pool.span(far).items():
        tensor = getattr(pool, kind)
        assert torch.equal(bytes_at(tensor, span), tensor[far].view(-1).view(torch.uint8))
    cpu = digest_slot(pool.state[far, :2].cpu(), pool.conv[far, :2].cpu(), (0, 1))
    assert {name: pool.sign(far).sums[name] for name in cpu.sums} == cpu.sums


@pytest.mark.parametrize("border", [1 << 31, 1 << 32])
def test_a_page_beyond_the_border_is_signed_copied_and_named_like_any_other(border):
    elements = 24 * 64 * 576
    far = border // elements + 1
    pool = LatentPool(RELEASE, far + 2, dtype=DTYPE, device="cuda")
    pool.pages[far : far + 2].normal_()
    pool.sign([far], 0)
    pool.copy(far, 0)
    assert far * elements > border
    assert pool.signed([0], 64) == pool.measure([far], 64)
    span = pool.spans([far, far + 1])[0]
    assert torch.equal(bytes_at(pool.pages, span), pool.pages[far:].view(-1).view(torch.uint8))
    cpu = digest_latents(pool.pages[[far, far + 1]].cpu(), RELEASE.mla_layers, 100)
    assert pool.measure([far, far + 1], 100) == cpu
    pool.zero_rest([far, far + 1], 100)
    assert not pool.pages[far + 1, :, 36:].any() and pool.pages[far + 1, :, :36].all(2).any()


def test_device_memory_is_read_by_another_agent_span_for_span():
    nixl = pytest.importorskip("common.transfer.nixl")
    source, target = nixl.NixlLink("gpu-source"), nixl.NixlLink("gpu-target")
    theirs = torch.randn(1 << 24, device="cuda")
    mine = torch.zeros(1 << 24, device="cuda")
    peer = endpoint(source, "p0", (source.register("state", theirs),))
    target.register("state", mine)
    target.connect(peer)
    half = Span(pool="state", offset=0, size=1 << 25)
    read = target.read(peer, [(half, moved(half, 1 << 25))])
    while not read.poll():
        pass
    read.release()
    assert torch.equal(mine[: 1 << 23], theirs[1 << 23 :])
    assert not mine[1 << 23 :].any()


def moved(span: Span, by: int) -> Span:
    return Span(pool=span.pool, offset=span.offset + by, size=span.size)
