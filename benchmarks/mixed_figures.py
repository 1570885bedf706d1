"""What a mixed load is, and what its answers' times come to: seeded arrivals, percentiles, goodput.

Pure arithmetic; `benchmarks.mixed` asks and measures.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request of a load: when it arrives, in seconds of its window, and its prompt."""

    at: float
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """What a good answer is: seconds to the first token, and for each after it on average."""

    first_s: float
    each_s: float


@dataclass(slots=True, kw_only=True)
class Answered:
    """What became of one request; `times` are seconds since it arrived, one a token."""

    prompt: int
    wanted: int  # tokens
    ids: list[int]
    times: list[float]
    error: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether every token came."""
        return len(self.times) == self.wanted

    @property
    def first_s(self) -> float:
        """Seconds to the first token; infinite where none came."""
        return self.times[0] if self.times else math.inf

    @property
    def each_s(self) -> float:
        """Mean seconds of a token after the first; infinite where the answer is not whole."""
        if not self.is_whole:
            return math.inf
        return (self.times[-1] - self.times[0]) / max(1, self.wanted - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between two tokens."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    def meets(self, objective: Objective) -> bool:
        """Whether it is a good answer."""
        return self.first_s <= objective.first_s and self.each_s <= objective.each_s


def load(
    rate: float, window_s: float, lengths: tuple[int, int], vocab: int, seed: int
) -> list[Asked]:
    """Poisson arrivals of `rate` a second over a window; prompts' lengths are log-uniform.

    The same arguments give the same load, whoever asks.
    """
    draw = random.Random(seed)
    low, high = lengths
    asked: list[Asked] = []
    at = draw.expovariate(rate)
    while at < window_s:
        count = round(low * (high / low) ** draw.random())
        ids = tuple(draw.choices(range(2, vocab), k=count))
        asked.append(Asked(at=at, token_ids=ids))
        at += draw.expovariate(rate)
    return asked


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest rank: the least value that `share` of all do not pass; NaN of none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def figures(answers: Sequence[Answered], window_s: float, objective: Objective) -> dict[str, Any]:
    """A side's figures at one rate.

    Requests that did not end count as infinitely late (None); goodput is good answers for each
    second of the window in which they arrived.
    """
    good = sum(answer.meets(objective) for answer in answers)
    gaps = [gap for answer in answers for gap in answer.gaps]
    found: dict[str, Any] = {
        "requests": len(answers),
        "whole": sum(answer.is_whole for answer in answers),
        "good": good,
        "goodput": round(good / window_s, 3),
        "prompt_tokens": sum(answer.prompt for answer in answers),
    }
    for name, values in (
        ("first_s", [answer.first_s for answer in answers]),
        ("each_s", [answer.each_s for answer in answers]),
        ("gap_s", gaps),
    ):
        for share in (0.5, 0.99):
            found[f"{name}_p{share * 100:.0f}"] = finite(percentile(values, share))
    found["gap_s_max"] = finite(max(gaps, default=math.nan))
    return found


def finite(seconds: float) -> float | None:
    """A figure for JSON."""
    return round(seconds, 5) if math.isfinite(seconds) else None


def equal(one: Sequence[Answered], other: Sequence[Answered]) -> dict[str, int]:
    """Of the requests that both sides answered whole, how many got the same tokens, and first."""
    both = [(a, b) for a, b in zip(one, other, strict=True) if a.is_whole and b.is_whole]
    return {
        "compared": len(both),
        "same": sum(a.ids == b.ids for a, b in both),
        "same_first": sum(a.ids[0] == b.ids[0] for a, b in both),
    }


def table(lines: Sequence[dict[str, Any]]) -> str:
    """The figures as a table of Markdown."""
    head = (
        "| arrivals a second | side | prefill step | first token, p50 | p99 | a token, p50 | p99 "
        "| longest gap | good answers a second | good of all |\n" + "|---" * 10 + "|"
    )

    def row(line: dict[str, Any]) -> str:
        case, f = line["case"], line["figures"]
        names = ("first_s_p50", "first_s_p99", "each_s_p50", "each_s_p99", "gap_s_max")
        times = ["never" if f[name] is None else f"{f[name] * 1e3:,.0f} ms" for name in names]
        cells = [f"{case['rate']:g}", case["side"], f"{case['chunk']:,}", *times]
        cells += [f"{f['goodput']:.2f}", f"{f['good']} of {f['requests']}"]
        return f"| {' | '.join(cells)} |"

    return "\n".join([head, *map(row, lines)])
