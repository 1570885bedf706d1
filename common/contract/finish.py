"""When a choice ends: one rule for prefill (the first token), decode (the rest) and the router."""

from __future__ import annotations

from common.contract.messages import Sampling


def finish_of(sampling: Sampling, token: int, emitted: int) -> str:
    """Why a choice ends with `token` as its `emitted`-th token (1-based): stop, length, or ""."""
    if token in sampling.stop_ids and emitted > sampling.min_tokens:
        return "stop"
    if emitted >= sampling.max_tokens:
        return "length"
    return ""
