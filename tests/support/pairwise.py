"""Rows in which every pair of values of every two factors occurs at least once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def pairwise(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True
) -> list[Row]:
    """Greedy cover: of all allowed rows, always the one with the most pairs still missing."""
    names = list(factors)
    rows = [
        dict(zip(names, values, strict=True)) for values in itertools.product(*factors.values())
    ]
    pairs = {id(row): pairs_of(row) for row in rows if allowed(row)}
    rows = [row for row in rows if id(row) in pairs]
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs[id(row)] & missing))
        chosen.append(best)
        missing -= pairs[id(best)]
    return chosen


def pairs_of(row: Row) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(row.items(), 2))
