"""Where tensors lie: pools, spans inside them, and the prints both sides must share."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec


class PoolInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One registered pool of a replica: its base address and size in bytes."""

    name: str  # "state", "conv", "latent" or "embed"
    address: int
    size: int
    device: int  # -1 for host memory, else the CUDA ordinal


class Agent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the memory of one rank of a replica is reached: its NIXL agent and its pools."""

    name: str
    metadata: bytes
    pools: tuple[PoolInfo, ...]


class Span(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A contiguous run of bytes of one pool."""

    pool: str
    offset: int
    size: int


def print_of(facts: Mapping[str, object]) -> str:
    """A print: BLAKE2b-128 over the facts as JSON with sorted keys, in hex."""
    return hashlib.blake2b(
        msgspec.json.encode(facts, order="deterministic"), digest_size=16
    ).hexdigest()
