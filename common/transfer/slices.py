"""The slice table: which bytes of which rank's slot go where, for any tensor ranks on either side.

A slot is [layers, heads, ...] on every rank, cut by heads, so a range of heads is one span a layer.
Latents are whole on every rank: a receiver reads one copy, and the copies must agree. Pure
arithmetic; slots and ranks are numbers, and nothing is moved here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from common.config.spec import TextSpec
from common.contract.regions import Span
from common.errors import ConfigError, HandoffRefused
from common.ops.digest import Signature
from common.transfer.link import Pair, pair_spans, part_of

STATE_ITEM = 4  # bytes of a value of recurrent state
REPLICATED = "latent"  # the kind that every tensor rank holds whole


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadMemory:
    """One kind of a slot's memory over all ranks together: `layers` x `heads` x `head_bytes`."""

    layers: int
    heads: int
    head_bytes: int

    def slot_bytes(self, ranks: int) -> int:
        """Bytes of the kind in one rank's slot."""
        return self.layers * (self.heads // ranks) * self.head_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One span: from an offset in the source rank's slot to one in the receiver's own."""

    source: int
    remote: int
    local: int
    size: int


def slot_memory(text: TextSpec, item_bytes: int) -> dict[str, HeadMemory]:
    """The two kinds of a slot of the whole model, with convolution rows of `item_bytes` a value."""
    kda, layers = text.kda, len(text.kda_layers)
    rows = (kda.conv_taps - 1) * 3 * kda.head_dim
    return {
        "state": HeadMemory(
            layers=layers, heads=kda.num_heads, head_bytes=kda.head_dim**2 * STATE_ITEM
        ),
        "conv": HeadMemory(layers=layers, heads=kda.num_heads, head_bytes=rows * item_bytes),
    }


def slices(memory: HeadMemory, *, sources: int, targets: int, target: int) -> tuple[Slice, ...]:
    """What one of `targets` receiving ranks reads from `sources` sending ranks, by source.

    Raises:
        ConfigError: the heads cannot be cut like this, or there is no such rank.
    """
    for ranks in (sources, targets):
        if ranks < 1 or memory.heads % ranks:
            raise ConfigError(
                f"{memory.heads} heads cannot be cut over {ranks} tensor ranks; take a divisor"
            )
    if not 0 <= target < targets:
        raise ConfigError(f"rank {target} is not one of {targets} receiving ranks")
    theirs, ours = memory.heads // sources, memory.heads // targets
    first, last = target * ours, (target + 1) * ours
    found: list[Slice] = []
    for source in range(first // theirs, -(-last // theirs)):
        low, high = max(first, source * theirs), min(last, (source + 1) * theirs)
        if high - low == theirs == ours:  # the whole slot is one span
            size = memory.slot_bytes(targets)
            return (Slice(source=source, remote=0, local=0, size=size),)
        for layer in range(memory.layers):
            found.append(
                Slice(
                    source=source,
                    remote=(layer * theirs + low - source * theirs) * memory.head_bytes,
                    local=(layer * ours + low - first) * memory.head_bytes,
                    size=(high - low) * memory.head_bytes,
                )
            )
    return tuple(found)


def copy_read(*, sources: int, targets: int, target: int) -> int:
    """The source whose copy of the latents a receiving rank reads: spread evenly over sources."""
    return target * sources // targets if targets >= sources else target * (sources // targets)


def pairs_by_source(
    table: Sequence[Slice], local: Span, remote: Sequence[Span]
) -> dict[int, list[Pair]]:
    """The table applied to slots: READs by source rank.

    Args:
        table: of `slices`.
        local: the receiver's slot.
        remote: the request's slot on every source rank.
    """
    pairs: dict[int, list[Pair]] = {}
    for part in table:
        pair = (
            part_of(local, part.local, part.size),
            part_of(remote[part.source], part.remote, part.size),
        )
        pairs.setdefault(part.source, []).append(pair)
    return pairs


def reads_of(
    memory: Mapping[str, HeadMemory],
    local: Mapping[str, Sequence[Span]],
    remote: Mapping[str, Sequence[Span]],
    *,
    sources: int,
    targets: int,
    target: int,
) -> dict[int, list[Pair]]:
    """Everything that one of `targets` ranks READs of a request, by source position.

    Args:
        memory: of `slot_memory`.
        local: the receiver's spans by kind, "canary_" kinds among them.
        remote: a ticket's, which hold on every source rank.
        sources: ranks of the sending side.
        targets: ranks of the receiving side.
        target: this one.
    """
    found: dict[int, list[Pair]] = {}
    for kind, spans in local.items():
        if kind == REPLICATED:
            copy = copy_read(sources=sources, targets=targets, target=target)
            found.setdefault(copy, []).extend(pair_spans(spans, remote[kind]))
            continue
        cut = memory[kind.removeprefix("canary_")]
        table = slices(cut, sources=sources, targets=targets, target=target)
        slots = [remote[kind][0]] * sources  # at the same place on every rank
        for source, pairs in pairs_by_source(table, spans[0], slots).items():
            found.setdefault(source, []).extend(pairs)
    return found


def whole(shards: Sequence[Signature]) -> Signature:
    """The signature of a request from those of its tensor ranks.

    Cut kinds add up; of the latents every rank holds a copy, and the copies must agree.

    Raises:
        HandoffRefused: digest:latent:<layer>, two copies differ.
    """
    cut = reduce(Signature.__add__, [_only(shard, copies=False) for shard in shards])
    copies = [_only(shard, copies=True) for shard in shards]
    for rank, copy in enumerate(copies):
        for name, value in copies[0].sums.items():
            if copy.sums.get(name) != value:
                raise HandoffRefused(
                    f"digest:{name}", f"the copies of tensor ranks 0 and {rank} differ"
                )
    unsound = {name for copy in copies for name in copy.unsound}
    return cut | Signature(sums=copies[0].sums, unsound=tuple(sorted(unsound)))


def same_layout(prints: Mapping[int, str]) -> str:
    """The layout print that all ranks of a side share.

    Raises:
        HandoffRefused: layout_print, two ranks lay out their memory differently.
    """
    first = min(prints)
    for rank, value in prints.items():
        if value != prints[first]:
            raise HandoffRefused(
                "layout_print",
                f"rank {rank} has {value} and rank {first} has {prints[first]}; start all ranks of "
                "a replica from the same settings and version",
            )
    return prints[first]


def _only(signed: Signature, *, copies: bool) -> Signature:
    def wanted(name: str) -> bool:
        return (name.partition(":")[0] == REPLICATED) is copies

    return Signature(
        sums={name: value for name, value in signed.sums.items() if wanted(name)},
        unsound=tuple(filter(wanted, signed.unsound)),
    )
