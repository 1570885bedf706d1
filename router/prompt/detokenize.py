"""Ids to text as they arrive, never half a character.

Bytes that may still become a character wait for the next token. Bytes that cannot become one any
more, and those still waiting when the text ends, become U+FFFD. Control tokens have no text here.
"""

from __future__ import annotations

import codecs

from router.prompt.tokenizer import Tokenizer

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one growing sequence of ids."""

    __slots__ = ("_decoder", "_tokenizer", "_waiting")

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Start with no text."""
        self._tokenizer = tokenizer
        self._decoder = _Utf8("replace")
        self._waiting = False

    def feed(self, token: int) -> str:
        """Text that became certain with `token`; may be empty."""
        piece = self._tokenizer.piece(token)
        if not self._waiting and piece.isascii():
            return piece.decode("ascii")
        text = self._decoder.decode(piece)
        self._waiting = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """U+FFFD for a character that never became whole; empty when none was begun."""
        if not self._waiting:
            return ""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._waiting = False
        return text
