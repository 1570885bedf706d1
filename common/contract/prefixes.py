"""Hashes of token sequences, shared by tickets, the prefix tree and the router's affinity."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def token_hash(token_ids: Sequence[int]) -> bytes:
    """BLAKE2b-128 over the ids as little-endian unsigned 32-bit words."""
    words = array("I", token_ids)
    if words.itemsize != 4:  # pragma: no cover - no platform of ours
        raise RuntimeError("unsigned int is not 32 bits wide here")
    return hashlib.blake2b(words.tobytes(), digest_size=16).digest()
