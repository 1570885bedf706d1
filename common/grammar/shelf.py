"""Compiled grammars, kept by their hash within a bound of bytes.

The library does not say how much memory a compiled grammar takes; what is counted is a bound that
was measured: see `weight`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from common.contract.grammar import Grammar
from common.grammar.library import Matcher, Vocabulary

BASE_BYTES = 256 << 10  # of a compiled grammar, whatever its text
BYTES_A_CHARACTER = 64  # of its text; 40 were measured before any mask


class GrammarShelf:
    """Matchers on request, from any thread. The vocabulary is read with the first one."""

    def __init__(self, directory: Path, *, cache_bytes: int) -> None:
        """`directory` is the checkpoint's."""
        self._directory, self._bound = directory, cache_bytes
        self._vocabulary: Vocabulary | None = None
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, tuple[Matcher, int]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self.held_bytes = 0

    def begin(self, grammar: Grammar) -> Future[Matcher]:
        """`matcher`, in a thread of the shelf's own."""
        return self._thread.submit(self.matcher, grammar)

    def close(self) -> None:
        """Begin nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def matcher(self, grammar: Grammar) -> Matcher:
        """A new matcher at the grammar's start; milliseconds, seconds for the first of all.

        Raises:
            InvalidRequest: the grammar cannot be read, or its text is not the one of its hash.
            CheckpointError: the checkpoint has no tokenizer.
        """
        grammar.check()
        with self._lock:
            if (found := self._kept.get(grammar.hash)) is not None:
                self._kept.move_to_end(grammar.hash)
                return found[0].copy()
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._directory)
            compiled = self._vocabulary.compile(grammar)
            self._keep(grammar, compiled)
            return compiled.copy()

    def _keep(self, grammar: Grammar, compiled: Matcher) -> None:
        size = weight(grammar)
        if size > self._bound:
            return
        self._kept[grammar.hash] = (compiled, size)
        self.held_bytes += size
        while self.held_bytes > self._bound:
            _, (_, old) = self._kept.popitem(last=False)
            self.held_bytes -= old


def weight(grammar: Grammar) -> int:
    """Bytes a compiled grammar is counted as."""
    return BASE_BYTES + BYTES_A_CHARACTER * len(grammar.source)
