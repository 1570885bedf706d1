"""The slice table: a hand-off between any numbers of tensor ranks, over real pools."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch

from common.cache.kda_pool import StatePool
from common.cache.layout import wire_layout
from common.cache.mla_pool import LatentPool
from common.config.checkpoint import parse_spec
from common.config.spec import TextSpec
from common.contract.messages import Endpoint
from common.contract.regions import print_of
from common.errors import ConfigError, HandoffRefused
from common.ops.digest import Signature
from common.parallel.mesh import Mesh, narrowed
from common.transfer.link import Pair, pair_spans
from common.transfer.local import Fabric, LocalLink
from common.transfer.slices import (
    copy_read,
    pairs_by_source,
    same_layout,
    slices,
    slot_memory,
    whole,
)
from tests.support.golden import GOLDEN

WAYS = (1, 2, 4, 8)
BF16 = torch.bfloat16
TOKENS = 100


def text() -> TextSpec:
    spec = parse_spec(json.loads((GOLDEN / "linear_mini" / "config.json").read_text())).text
    return replace(spec, kda=replace(spec.kda, num_heads=8), mla=replace(spec.mla, num_heads=8))


@dataclass
class Rank:
    """One rank's pools and link."""

    states: StatePool
    latents: LatentPool
    link: LocalLink
    place: Endpoint


def ranks(side: str, ways: int, fabric: Fabric) -> list[Rank]:
    spec = text()
    own, heads = narrowed(spec, Mesh(tensor=ways)), spec.kda.num_heads // ways
    out = []
    for rank in range(ways):
        states = StatePool(own, 3, dtype=BF16, device="cpu", first_head=rank * heads)
        latents = LatentPool(own, 4, dtype=BF16, device="cpu")
        link = LocalLink(f"{side}{rank}", fabric)
        pools = (
            link.register("state", states.state),
            link.register("conv", states.conv),
            link.register("latent", latents.pages),
        )
        place = Endpoint(
            room=side,
            id=link.agent,
            epoch=1,
            host="",
            port=0,
            agent=link.agent,
            agent_metadata=link.metadata(),
            pools=pools,
            model_print="m",
            layout_print=print_of(wire_layout(spec, BF16)),
        )
        out.append(Rank(states, latents, link, place))
    return out


def fill(sources: list[Rank]) -> Signature:
    """One request in slot 1 and pages 3, 1 of every source rank, cut from one whole request."""
    make = torch.Generator().manual_seed(0)
    spec = text()
    big = StatePool(spec, 1, dtype=BF16, device="cpu")
    big.state.copy_(torch.randn(big.state.shape, generator=make))
    big.conv.copy_(torch.randn(big.conv.shape, generator=make))
    latents = torch.randn(4, *sources[0].latents.pages.shape[1:], generator=make)
    heads = spec.kda.num_heads // len(sources)
    for rank, source in enumerate(sources):
        mine = slice(rank * heads, (rank + 1) * heads)
        source.states.state[1] = big.state[0, :, mine]
        source.states.conv[1] = big.conv[0, :, mine]
        source.latents.pages.copy_(latents)
    return big.sign(0) | sources[0].latents.measure((3, 1), TOKENS)


def signature(rank: Rank, slot: int, pages: tuple[int, ...]) -> Signature:
    return rank.states.sign(slot) | rank.latents.measure(pages, TOKENS)


def pull(sources: list[Rank], targets: list[Rank]) -> None:
    """Every target reads slot 1 and pages 3, 1 of the sources into its slot 2 and pages 0, 2."""
    memory = slot_memory(text(), BF16.itemsize)
    for number, target in enumerate(targets):
        reads: dict[int, list[Pair]] = {}
        for kind, span in target.states.span(2).items():
            table = slices(memory[kind], sources=len(sources), targets=len(targets), target=number)
            remote = [source.states.span(1)[kind] for source in sources]
            for source, pairs in pairs_by_source(table, span, remote).items():
                reads.setdefault(source, []).extend(pairs)
        chosen = copy_read(sources=len(sources), targets=len(targets), target=number)
        pages = pair_spans(target.latents.spans((0, 2)), sources[chosen].latents.spans((3, 1)))
        reads.setdefault(chosen, []).extend(pages)
        for source, pairs in reads.items():
            target.link.connect(sources[source].place)
            assert target.link.read(sources[source].place, pairs).poll()


@pytest.mark.parametrize("receiving", WAYS)
@pytest.mark.parametrize("sending", WAYS)
def test_a_request_arrives_whole_for_every_pair_of_tensor_ranks(sending, receiving) -> None:
    fabric = Fabric()
    sources, targets = ranks("prefill", sending, fabric), ranks("decode", receiving, fabric)
    signed = fill(sources)
    assert whole([signature(source, 1, (3, 1)) for source in sources]).sums == signed.sums
    pull(sources, targets)
    arrived = [signature(target, 2, (0, 2)) for target in targets]
    assert whole(arrived).sums == signed.sums
    states = torch.cat([target.states.state[2] for target in targets], 1)
    assert torch.equal(states, torch.cat([source.states.state[1] for source in sources], 1))
    convs = torch.cat([target.states.conv[2] for target in targets], 1)
    assert torch.equal(convs, torch.cat([source.states.conv[1] for source in sources], 1))


@pytest.mark.parametrize("receiving", WAYS)
@pytest.mark.parametrize("sending", WAYS)
def test_spans_cover_a_slot_once_and_no_more_than_needed(sending, receiving) -> None:
    memory = slot_memory(text(), BF16.itemsize)["state"]
    for target in range(receiving):
        table = slices(memory, sources=sending, targets=receiving, target=target)
        assert {part.source for part in table} <= set(range(sending))
        ends = sorted((part.local, part.local + part.size) for part in table)
        assert [start for start, _ in ends] == [0, *(end for _, end in ends[:-1])]
        assert ends[-1][1] == memory.slot_bytes(receiving)
        spans = 1 if sending == receiving else memory.layers * max(1, sending // receiving)
        assert len(table) == spans


def test_latents_are_read_from_copies_spread_evenly() -> None:
    read = [copy_read(sources=2, targets=8, target=t) for t in range(8)]
    assert read == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [copy_read(sources=8, targets=2, target=t) for t in range(2)] == [0, 4]


def test_copies_of_latents_that_differ_are_refused_by_layer() -> None:
    sources = ranks("prefill", 2, Fabric())
    fill(sources)
    sources[1].latents.pages[3, 0, 5, 7] += 1
    with pytest.raises(HandoffRefused, match="digest:latent"):
        whole([signature(source, 1, (3, 1)) for source in sources])


def test_a_head_that_went_to_the_wrong_rank_shows() -> None:
    sources = ranks("prefill", 2, Fabric())
    signed = fill(sources)
    first, second = (source.states.state[1].clone() for source in sources)
    sources[0].states.state[1], sources[1].states.state[1] = second, first
    assert whole([signature(source, 1, (3, 1)) for source in sources]).sums != signed.sums


def test_ranks_whose_layouts_differ_are_refused_by_print() -> None:
    assert same_layout({0: "a", 1: "a"}) == "a"
    with pytest.raises(HandoffRefused, match="rank 1 has b") as refused:
        same_layout({0: "a", 1: "b"})
    assert refused.value.part == "layout_print"


def test_heads_that_do_not_divide_are_a_sentence() -> None:
    memory = slot_memory(text(), 2)["state"]
    with pytest.raises(ConfigError, match="8 heads cannot be cut over 3"):
        slices(memory, sources=3, targets=1, target=0)
    with pytest.raises(ConfigError, match="rank 2 is not one of 2"):
        slices(memory, sources=1, targets=2, target=2)
