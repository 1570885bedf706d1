"""The grammar an answer must follow, as it travels in jobs: its text, never a position in it.

A room compiles the text again and finds the position by feeding the tokens that were emitted, so
that a replay and every one of n choices stand where they stood.
"""

from __future__ import annotations

import hashlib

import msgspec

from common.errors import InvalidRequest

KIND = "lark"  # the only kind there is: one text that covers a reply from its first token on


class Grammar(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A grammar over bytes and control tokens; `hash` is BLAKE2b-128 over kind and source."""

    kind: str
    source: str
    hash: bytes

    @classmethod
    def of(cls, source: str) -> Grammar:
        """The grammar with this text."""
        return cls(kind=KIND, source=source, hash=_hash(KIND, source))

    def check(self) -> None:
        """Refuse a text that is not the one that was signed, or of a kind nobody here reads.

        Raises:
            InvalidRequest: which of the two.
        """
        if self.kind != KIND:
            raise InvalidRequest(f"a grammar of kind {self.kind[:20]!r} came; only {KIND} is read")
        if self.hash != _hash(self.kind, self.source):
            raise InvalidRequest("the grammar's text does not have the hash it came with")


def _hash(kind: str, source: str) -> bytes:
    return hashlib.blake2b(f"{kind}\0{source}".encode(), digest_size=16).digest()
