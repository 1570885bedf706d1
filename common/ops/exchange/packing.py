"""What a library's exchange of decode batches makes of Baton's rows, as plain arithmetic.

The library (DeepEP's low-latency kernels, in NIXL's build) packs what arrives by expert, at most
`cap` rows of each rank. Its kernels exist for some widths and a largest number of choices: rows are
padded to the next width, and a row with more choices travels as several, each with its part of the
choices. Outputs come back into a registered buffer, one place for each expert of all ranks and each
row that left. The library would add them up with fused products, and round parts before they are
whole; they are added up from there instead, with the definition's bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import BackendUnsupported

HEAD = 16  # bytes before a row that is sent
SCALE = 128  # values that share a scale in the library's messages, whatever is sent
ALIGN = 128  # bytes; parts of a buffer begin on a multiple
MOST_ROWS = 1024  # of a rank: the kernels count them against this number
ROWS_ALIKE = 4  # what arrives is a multiple, for wide copies


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What a release's kernels take."""

    choices: int  # most of one row
    widths: tuple[int, ...]  # values of a row


OLD = Kernels(choices=11, widths=(2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192))
NEW = Kernels(choices=16, widths=(2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192))


def kernels_of(version: str) -> Kernels:
    """The kernels in a release of nixl-cu13, by its version."""
    major, minor = version.split(".")[:2]
    return NEW if (int(major), int(minor)) >= (1, 5) else OLD


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The sizes of one exchange, the same on every rank."""

    ranks: int
    rows: int  # most of a rank in a pass
    top: int  # choices of a row
    width: int  # values of a row
    experts: int  # places of a rank
    parts: int  # rows that a row travels as
    wide: int  # values of a row that travels

    @property
    def each(self) -> int:
        """Choices of a row that travels; the last part's may be fewer."""
        return -(-self.top // self.parts)

    @property
    def cap(self) -> int:
        """Most rows that leave a rank."""
        return -(-self.rows * self.parts // ROWS_ALIKE) * ROWS_ALIKE

    @property
    def slots(self) -> int:
        """Places for the rows that one expert may get."""
        return self.ranks * self.cap

    @property
    def places(self) -> int:
        """Most rows, one for each choice, that may arrive at a rank."""
        return self.ranks * self.rows * min(self.top, self.experts)

    @property
    def stride(self) -> int:
        """Values from one output that came back to the next: with room for scales behind it."""
        return self.wide + 2 * (self.wide // SCALE)

    @property
    def returns(self) -> int:
        """Outputs that the buffer has places for: [experts of all ranks, cap]."""
        return self.ranks * self.experts * self.cap

    @property
    def home(self) -> int:
        """Where outputs lie that came back, in bytes: the second of what is received."""
        return 2 * (self._flags + self._sent) + self._received

    @property
    def bytes(self) -> int:
        """Of the registered buffer: flags, sent and received, each for two kernels in turns.

        Source: the buffer layout of NIXL EP (examples/device/ep/csrc/config.hpp), which reserves
        room for rows in fp8 and in bf16 alike; dispatch and combine take turns, so outputs come
        back into the second. `open_nixl_ep` compares all this with the installed package.
        """
        return (2 * (self._flags + self._sent + self._received) + ALIGN) // ALIGN * ALIGN

    @property
    def _flags(self) -> int:
        return -(-self.ranks * self.experts * 8 // ALIGN) * ALIGN

    @property
    def _sent(self) -> int:
        return max(self.cap * self._row, self.returns * 2 * self.stride)

    @property
    def _received(self) -> int:
        return self.returns * max(self._row, 2 * self.stride)

    @property
    def _row(self) -> int:
        return HEAD + max(2 * self.wide, self.wide + 4 * (self.wide // SCALE))


def packing_of(
    kernels: Kernels, *, ranks: int, rows: int, top: int, width: int, experts: int
) -> Packing:
    """The sizes for a model over ranks.

    Args:
        kernels: of the installed release.
        ranks: that hold every expert once.
        rows: most of a rank in one pass.
        top: choices of a row.
        width: values of a row.
        experts: places of a rank's share.

    Raises:
        BackendUnsupported: the kernels do not take it; the sentence has the number and a remedy.
    """
    wide = next((known for known in kernels.widths if known >= width), None)
    if wide is None:
        raise BackendUnsupported(
            f'exchange "nixl_ep" has kernels for rows of up to {kernels.widths[-1]} values, not '
            f'{width}; set decode.exchange = "all_to_all"'
        )
    if ranks >= 8 and ranks % 8:
        raise BackendUnsupported(
            f'exchange "nixl_ep" takes up to 8 ranks or a multiple of 8, not {ranks}; take another '
            "decode.expert"
        )
    made = Packing(
        ranks=ranks, rows=rows, top=top, width=width, experts=experts,
        parts=-(-top // kernels.choices), wide=wide,
    )  # fmt: skip
    if made.cap > MOST_ROWS:
        raise BackendUnsupported(
            f'exchange "nixl_ep" sends at most {MOST_ROWS} rows of a rank at once, and {rows} rows '
            f"of {top} choices travel as {made.cap}; lower decode.max_batch to "
            f"{MOST_ROWS // made.parts}"
        )
    return made
