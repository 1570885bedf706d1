"""A process that compiles grammars, so that a bad one costs nobody else time or memory.

`python -m common.grammar.worker DIRECTORY MEMORY_BYTES` reads requests from standard input and
answers on standard output, both msgpack after a length of four bytes, big-endian. The first answer
comes unasked when the vocabulary was read. Its parent ends it when an answer takes too long.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import BinaryIO

import msgspec

from common.contract.grammar import Grammar
from common.errors import InvalidRequest
from common.grammar.library import Vocabulary

HEAD = 4  # bytes of a length
PROBE_STEPS = 16  # tokens a probe goes into the form: some faults show only on the way


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """Compile this, and see that something may follow each of the beginnings (ids)."""

    grammar: Grammar
    beginnings: tuple[tuple[int, ...], ...] = ()


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Empty: the grammar is good. Otherwise why not."""

    fault: str = ""


def judge(vocabulary: Vocabulary, check: Check) -> Verdict:
    """Compile and probe one grammar."""
    try:
        start = vocabulary.compile(check.grammar)
    except InvalidRequest as error:
        return Verdict(fault=str(error))
    for beginning in check.beginnings:
        matcher = start.copy()
        matcher.take(*beginning)
        for _ in range(PROBE_STEPS):
            mask = matcher.mask()
            if not any(mask):
                return Verdict(fault=matcher.why_lost or "no answer at all satisfies it")
            at = next(at for at, byte in enumerate(mask) if byte)
            matcher.take(8 * at + (mask[at] & -mask[at]).bit_length() - 1)
            if matcher.is_complete:
                break
    return Verdict()


def write(pipe: BinaryIO, message: msgspec.Struct) -> None:
    """One message with its length."""
    data = msgspec.msgpack.encode(message)
    pipe.write(len(data).to_bytes(HEAD, "big") + data)
    pipe.flush()


def serve(vocabulary: Vocabulary, source: BinaryIO, sink: BinaryIO) -> None:
    """Answer until the other side closes."""
    write(sink, Verdict())
    while head := source.read(HEAD):
        data = source.read(int.from_bytes(head, "big"))
        write(sink, judge(vocabulary, msgspec.msgpack.decode(data, type=Check)))


def main() -> None:
    """Read the vocabulary, then bound the memory that grammars may take on top of it."""
    directory, memory_bytes = Path(sys.argv[1]), int(sys.argv[2])
    vocabulary = Vocabulary(directory)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    serve(vocabulary, sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
