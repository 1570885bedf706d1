"""JSON inside JSON: the arguments of calls, read as strictly as the strictest of their readers.

NaN and infinity are no JSON, nor is a number that a reader would take for infinity.
"""

from __future__ import annotations

import json
import math
from typing import Any


def read_json(text: str) -> Any:
    """The value of a text, integers of any length included.

    Raises:
        ValueError: it is not JSON, or has a number beyond what 64 bits can tell from infinity.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def is_json(text: str) -> bool:
    """Whether `read_json` would read it, integers beyond Python's own limit of digits included."""
    try:
        json.loads(text, parse_int=str, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is out of range")
    return value
