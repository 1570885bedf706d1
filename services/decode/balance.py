"""Which rank holds which experts: a placement chosen from the load that was counted.

Pure functions. Popular experts get copies where there is memory for more places than experts; with
several nodes an expert and its copies stay on one, so that a row crosses between nodes as seldom
as without copies. Applying a placement (moving weights, switching the tables) is done elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import ConfigError
from common.parallel.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Weights to fetch: a place of one share gets an expert that another share holds."""

    share: int
    place: int
    expert: int
    source: int


def balance(load: Sequence[float], *, shares: int, places: int, nodes: int = 1) -> Placement:
    """Choose a placement for one layer.

    Args:
        load: rows that chose each expert, E of them.
        shares: ranks (or groups of tensor ranks) that hold whole experts.
        places: experts that each share has memory for.
        nodes: equal runs of neighbouring shares with fast links inside.

    Raises:
        ConfigError: the experts do not fit, or the shares do not divide over the nodes.
    """
    if shares % nodes:
        raise ConfigError(f"{shares} shares do not divide over {nodes} nodes; take a divisor")
    if shares * places < len(load):
        raise ConfigError(
            f"{len(load)} experts do not fit {shares} shares of {places}; "
            f"give each at least {-(-len(load) // shares)} places"
        )
    inside = shares // nodes
    chosen: list[list[int]] = []
    for experts in _divide(load, nodes, inside * places):
        counts = _copies(load, experts, inside * places, inside)
        chosen += _pack(load, counts, inside, places)
    return Placement(tuple(tuple(share) for share in chosen))


def imbalance(load: Sequence[float], placement: Placement) -> float:
    """The busiest share's rows over the mean, 1 at best; copies of an expert share its rows."""
    copies = [0] * len(load)
    for share in placement.shares:
        for expert in share:
            copies[expert] += 1
    rows = [sum(load[e] / copies[e] for e in share) for share in placement.shares]
    total = sum(rows)
    return max(rows) * len(rows) / total if total else 1.0


def settled(old: Placement, new: Placement) -> Placement:
    """The new placement with every expert that stays in a share left at its old place."""
    shares = []
    for before, after in zip(old.shares, new.shares, strict=True):
        coming = [expert for expert in after if expert not in before]
        kept = [expert if expert in after else None for expert in before]
        kept += [None] * (len(after) - len(before))
        filled = [coming.pop(0) if expert is None and coming else expert for expert in kept]
        shares.append(tuple(expert for expert in filled if expert is not None))
    return Placement(tuple(shares))


def moves(old: Placement, new: Placement) -> tuple[Move, ...]:
    """Weights to fetch for a settled placement, the sources used in turn."""
    holders: dict[int, list[int]] = {}
    found: list[Move] = []
    for number, share in enumerate(old.shares):
        for expert in share:
            holders.setdefault(expert, []).append(number)
    for number, share in enumerate(new.shares):
        before = old.shares[number]
        for place, expert in enumerate(share):
            if place < len(before) and before[place] == expert:
                continue
            sources = holders[expert]
            source = sources[len(found) % len(sources)]
            found.append(Move(share=number, place=place, expert=expert, source=source))
    return tuple(found)


def _divide(load: Sequence[float], nodes: int, room: int) -> list[list[int]]:
    """Experts to nodes: the heaviest first, each to the lightest node, in equal numbers."""
    most = min(room, -(-len(load) // nodes))
    found: list[list[int]] = [[] for _ in range(nodes)]
    weight = [0.0] * nodes
    for expert in sorted(range(len(load)), key=lambda e: (-load[e], e)):
        node = min((n for n in range(nodes) if len(found[n]) < most), key=lambda n: weight[n])
        found[node].append(expert)
        weight[node] += load[expert]
    return found


def _copies(load: Sequence[float], experts: list[int], places: int, most: int) -> dict[int, int]:
    """How many copies each expert gets: the next one always to the most loaded copy."""
    counts = dict.fromkeys(experts, 1)
    for _ in range(places - len(experts)):
        open_ = [e for e in experts if counts[e] < most]
        if not open_:
            break
        heaviest = max(open_, key=lambda e: (load[e] / counts[e], -e))
        if not load[heaviest]:
            break
        counts[heaviest] += 1
    return counts


def _pack(
    load: Sequence[float], counts: dict[int, int], shares: int, places: int
) -> list[list[int]]:
    """Copies to shares: the heaviest first, each to the lightest share that lacks the expert."""
    copies = [(load[e] / n, e) for e, n in counts.items() for _ in range(n)]
    copies.sort(key=lambda copy: (-copy[0], copy[1]))
    found: list[list[int]] = [[] for _ in range(shares)]
    weight = [0.0] * shares
    for rows, expert in copies:
        free = [s for s in range(shares) if len(found[s]) < places and expert not in found[s]]
        if not free:
            continue  # an expert less often copied than it might be; one copy always found room
        share = min(free, key=lambda s: (weight[s], s))
        found[share].append(expert)
        weight[share] += rows
    return found
