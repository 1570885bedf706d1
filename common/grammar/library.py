"""The only module that speaks to the grammar library (llguidance); its words are explained here.

A `Matcher` stands at a position in one grammar. It says which tokens may come next and moves on by
the token that came. It never raises on a token: a matcher that was fed one its grammar does not
allow is lost, and a lost matcher allows nothing. Why this library: docs/decisions/0002.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import llguidance
from llguidance.tiktoken import lltokenizer_from_encoding

from common.config.vocabulary import END_OF_MSG, PIECES, SLOTS, control_tokens, read_ranks
from common.contract.grammar import Grammar
from common.errors import InvalidRequest

if TYPE_CHECKING:  # a router starts without numpy
    import numpy as np
    from numpy.typing import NDArray

LONGEST_REASON = 300  # characters of the library's words that reach a client
PLAINER = (  # its places in its own source, its marks, and its advice to who calls it
    (r"\bat \d+\(\d+\): |failed to compile JSON schema: |\s*<non-verbose/>", ""),
    (r"\W+Enable 'coerce_one_of'.*", "; write anyOf, or parts that exclude each other"),
    (r"; (?:either increase limits|consider making your grammar).*", "; make it simpler"),
    (r"lexer error: too many expressions constructed", "it is too large; make it simpler"),
    (r".*NoExtensionBias.*", "no text fits it"),
)

# What a compilation and a step may cost, in the library's own units: past any of these a matcher is
# lost, so that no text can hold up a room.
LIMITS: Any = llguidance.LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)


class Vocabulary:
    """What every token id stands for, in the form the library wants. Threads may share it."""

    def __init__(self, directory: Path) -> None:
        """Read the tokenizer of a checkpoint directory: about two seconds for 163,840 ids.

        Raises:
            CheckpointError: its tokenizer is missing or wrong.
        """
        ranks = read_ranks(directory / "tiktoken.model")
        controls = control_tokens(len(ranks))
        self.size = len(ranks) + SLOTS
        self._encoding = lltokenizer_from_encoding(
            SimpleNamespace(_mergeable_ranks=ranks, _special_tokens=controls, _pat_str=PIECES),  # type: ignore[arg-type]
            n_vocab=self.size,
            eos_token=controls[END_OF_MSG],
        )

    def compile(self, grammar: Grammar) -> Matcher:
        """A matcher at the grammar's start.

        Raises:
            InvalidRequest: the grammar cannot be read; the message says what is wrong with it.
        """
        grammar.check()
        matcher = llguidance.LLMatcher(self._encoding, grammar.source, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise InvalidRequest(_reason(matcher.get_error()))
        return Matcher(matcher, self.size)


class Matcher:
    """A position in a grammar. Used by one thread at a time."""

    def __init__(self, matcher: Any, size: int) -> None:
        """`matcher` is the library's, over `size` ids."""
        self._matcher, self._size = matcher, size
        self._taken: list[int] = []  # not told to the library yet

    def mask(self) -> bytes:
        """Which ids may come next: a bit an id, the lowest bit of a byte first.

        All zero when nothing may come: the matcher is lost (`why_lost`), or the grammar was
        completed before.
        """
        bits: bytes = self._moved().compute_bitmask()
        return bytes(len(bits)) if self._is_over() else bits

    def take(self, *tokens: int) -> None:
        """Move on by tokens that were emitted; the work is done when somebody asks."""
        self._taken += tokens

    @property
    def why_lost(self) -> str:
        """Why nothing is allowed any more; empty while something is."""
        matcher = self._moved()
        return _reason(matcher.get_error()) if matcher.is_error() else ""

    @property
    def is_complete(self) -> bool:
        """Whether what was taken is a whole answer."""
        matcher = self._moved()
        return not matcher.is_error() and bool(matcher.is_accepting())

    def copy(self) -> Matcher:
        """Another matcher at the same position; compiled parts are shared."""
        return Matcher(self._moved().deep_copy(), self._size)

    @property
    def width(self) -> int:
        """Bytes of its line for a `Filler`: whole words of four."""
        return -(-self._size // 32) * 4

    def _moved(self) -> Any:
        if self._taken:
            self._matcher.consume_tokens(self._taken)
            self._taken = []
        return self._matcher

    def _is_over(self) -> bool:
        return bool(self._matcher.is_error() or self._matcher.is_stopped())


class Filler:
    """Masks of many matchers at once, in threads of the library, without Python's lock."""

    def __init__(self) -> None:
        """Nothing is started before the first masks."""
        self._executor: Any = None

    def __call__(self, matchers: Sequence[Matcher], lines: NDArray[np.uint8]) -> None:
        """Write the mask of each matcher.

        Args:
            matchers: n different ones of one vocabulary.
            lines: uint8 [n, width], contiguous; bits as of `Matcher.mask`.
        """
        if self._executor is None:
            self._executor = llguidance.LLExecutor()
        single = [matcher for matcher in matchers if len(matcher._taken) == 1]
        if single:  # no call of none
            self._executor.consume_token_par([(m._matcher, m._taken.pop()) for m in single])
        pairs = [(matcher._moved(), at) for at, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(
            pairs, lines.ctypes.data, lines.shape[1], lines.shape[0]
        )
        for at, matcher in enumerate(matchers):
            if matcher._is_over():
                lines[at] = 0


def _reason(text: str) -> str:
    """The library's words as one short sentence, without its dumps and line drawings."""
    text = text.split("<state>")[0]
    text = re.sub(r"\n\s*(?:\d+ )?\|.*|\n\s*\^+", "", text)
    text = " ".join(text.split())
    for pattern, words in PLAINER:
        text = re.sub(pattern, words, text)
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}…"
