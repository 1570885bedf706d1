"""A request that ended as lines of text: where its time went, room by room.

Takes what the second listener says under `/admin/requests/ID`; prints nothing itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

WIDTH = 40  # characters of a whole request


def lines(past: Mapping[str, Any]) -> Iterator[str]:
    """A head, a line for each part with those that lie in it below, and one for each stumble."""
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(past["began"]))
    yield f"{past['request']}: {past['outcome']} after {_ms(past['total_s'])} ms, began {began} UTC"
    if past["client"]:
        yield f"  its client calls it {past['client']}"
    if past["trace"]:
        yield f"  trace {past['trace']}"
    first = past["first_token_s"]
    when = "no token came" if first is None else f"the first after {_ms(first)} ms"
    yield f"  {past['prompt_tokens']} tokens asked, {past['completion_tokens']} answered, {when}"
    yield f"  {'':16}{'at ms':>10}{'took ms':>10}"
    for part in past["parts"]:
        if part["within"]:
            continue
        yield _line(part, past["total_s"], "")
        for inner in past["parts"]:
            if inner["within"] == part["name"] and _is_inside(inner, part):
                yield _line(inner, past["total_s"], "  ")
    for stumble in past["stumbles"]:
        what = {"replay": "continued elsewhere", "reprefill": "prefilled again"}[stumble["name"]]
        yield f"  at {_ms(stumble['at_s'])} ms {what}: {stumble['why']} at {stumble['replica']}"


def _line(part: Mapping[str, Any], total_s: float, indent: str) -> str:
    scale = WIDTH / total_s if total_s else 0.0
    start = min(WIDTH - 1, int(part["at_s"] * scale))
    bar = " " * start + "#" * max(1, min(WIDTH - start, round(part["long_s"] * scale)))
    told = f"  {indent + part['name']:16}{_ms(part['at_s']):>10}{_ms(part['long_s']):>10}"
    ended = f" {part['error']}" if part["error"] else ""
    return f"{told}  {bar:{WIDTH}}  {part['replica']}{ended}".rstrip()


def _is_inside(inner: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    """Whether it lies in this one of several parts of that name."""
    middle = inner["at_s"] + inner["long_s"] / 2
    return bool(part["at_s"] <= middle <= part["at_s"] + part["long_s"])


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f}"
