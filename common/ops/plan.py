"""Where the rows of one forward pass belong: the index tensors that ops on pools share.

Plain data on the model's device; made once a pass by `common.model`. Nothing here owns memory.
All index tensors are int64: a slot's and a page's element offsets pass 2^31 at the release's size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """A pass over whole grid chunks of S shares, C chunks in all, in share order.

    Rows of the pass are [C, 64]: chunk c holds `lengths[c]` tokens, then padding. Only the last
    chunk of a share may be short. Share s owns chunks `first[s]` to `first[s + 1]`, of which the
    first lies at grid index `starts[s] // 64`; grid index i of share s is page `tables[s, i]`.
    """

    slots: Tensor  # int64 [S]
    first: Tensor  # int64 [S + 1]
    starts: Tensor  # int64 [S], tokens absorbed before this pass, multiples of 64
    lengths: Tensor  # int64 [C], 1 to 64
    tables: Tensor  # int64 [S, P], page numbers, -1 where a share owns none


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """A pass of one token for each of B shares.

    A row whose slot and start are -1 is padding: it owns nothing, ops touch no memory for it, and
    what they return for it is finite.
    """

    slots: Tensor  # int64 [B]
    starts: Tensor  # int64 [B], tokens absorbed before this one
    tables: Tensor  # int64 [B, P], page numbers, -1 where a share owns none

    def real(self) -> tuple[Tensor, Steps]:
        """The numbers of the rows that are not padding, and their plan; waits for the device."""
        rows = (self.slots >= 0).nonzero()[:, 0]
        if len(rows) == len(self.slots):
            return rows, self
        plan = Steps(slots=self.slots[rows], starts=self.starts[rows], tables=self.tables[rows])
        return rows, plan
