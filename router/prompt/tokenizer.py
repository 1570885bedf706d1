"""The tokenizer of a checkpoint: text to ids and ids to bytes, read from its `tiktoken.model`.

`encode` never yields a control token, whatever the text says: control tokens are fetched by name.
Nothing here knows of messages or channels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import tiktoken

from common.config.vocabulary import PIECES, SLOTS, control_tokens, read_ranks

# The release encodes long text in stretches of this many characters, and cuts runs without (or
# of nothing but) white space; the same cuts give the same ids and bound the work of one piece.
STRETCH = 400_000
LONGEST_RUN = 25_000
_RUNS = re.compile(r"\s+|\S+")

_SHORT_TEXT = 48  # characters; the template's own words are shorter and come again and again


class Tokenizer:
    """One checkpoint's vocabulary. Immutable after construction, so threads may share it."""

    def __init__(self, path: Path) -> None:
        """Read the `tiktoken.model` file at `path`.

        Raises:
            CheckpointError: the file is missing or is not a list of base64 pieces and ranks.
        """
        ranks = read_ranks(path)
        self.base = len(ranks)
        self.vocab = self.base + SLOTS
        self.specials = control_tokens(self.base)
        self.end_of_msg = self.specials["<|end_of_msg|>"]
        self.open = self.specials["<|open|>"]
        self.close = self.specials["<|close|>"]
        self.sep = self.specials["<|sep|>"]
        self.media_begin = self.specials["<|media_begin|>"]
        self.media_content = self.specials["<|media_content|>"]
        self.media_end = self.specials["<|media_end|>"]
        self.media_pad = self.specials["<|media_pad|>"]
        self._encoding = tiktoken.Encoding(
            path.parent.name, pat_str=PIECES, mergeable_ranks=ranks, special_tokens=self.specials
        )
        self._pieces = sorted(ranks, key=lambda piece: ranks[piece])
        self._names = list(self.specials)
        self._marks = re.compile("|".join(re.escape(name) for name in self._names))
        self._encode_short = lru_cache(maxsize=4096)(self._encode)

    def encode(self, text: str) -> Sequence[int]:
        """Ids of ordinary text; what looks like a control token is text."""
        return self._encode_short(text) if len(text) <= _SHORT_TEXT else self._encode(text)

    def encode_marked(self, text: str) -> list[int]:
        """Ids of text in which control tokens are written by name. Never for a client's words."""
        ids: list[int] = []
        end = 0
        for mark in self._marks.finditer(text):
            ids += self._encode(text[end : mark.start()])
            ids.append(self.specials[mark[0]])
            end = mark.end()
        return ids + list(self._encode(text[end:]))

    def piece(self, token: int) -> bytes:
        """Bytes of an ordinary token; nothing for a control token."""
        return self._pieces[token] if token < self.base else b""

    def name(self, token: int) -> str | None:
        """Name of a control token; None for an ordinary one."""
        return self._names[token - self.base] if token >= self.base else None

    def decode(self, ids: Sequence[int], *, names: bool = True) -> str:
        """Text of ids, control tokens by name or left out; broken characters as U+FFFD."""
        pieces = (
            (self.name(i) or "").encode() if names and i >= self.base else self.piece(i)
            for i in ids
        )
        return b"".join(pieces).decode("utf-8", "replace")

    def _encode(self, text: str) -> tuple[int, ...]:
        if len(text) <= LONGEST_RUN:
            return tuple(self._encoding.encode_ordinary(text))
        return tuple(i for part in _parts(text) for i in self._encoding.encode_ordinary(part))


def _parts(text: str) -> Iterator[str]:
    """Stretches of `text` without a run of more than `LONGEST_RUN` characters of one kind."""
    for start in range(0, len(text), STRETCH):
        stretch = text[start : start + STRETCH]
        begin = 0
        for run in _RUNS.finditer(stretch):
            for cut in range(run.start() + LONGEST_RUN, run.end(), LONGEST_RUN):
                yield stretch[begin:cut]
                begin = cut
        yield stretch[begin:]


@lru_cache(maxsize=8)
def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a checkpoint directory, read once a process."""
    return Tokenizer(directory / "tiktoken.model")
