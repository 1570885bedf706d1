"""Sampling on a GPU: parameters go over in one copy, results come back in one; nothing waits.

The kernels are `common.ops.draw.triton`. Tokens are the definition's (`sampler`): the noise has the
same bits, the sums that decide are of integers, and the arithmetic is float64; only logarithms and
exponentials may differ from a CPU's in their last bit. Log-probabilities agree to float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.contract.messages import TokenOut
from common.ops.draw import triton as kernels
from common.ops.draw.triton_row import COLUMNS, ID_BITS
from common.sampling import noise
from common.sampling.history import MOST_KEPT, Entries, History
from common.sampling.masks import block_of
from common.sampling.rows import Row, changes_logits, is_scripted

_AT = {name: i for i, name in enumerate(COLUMNS)}
_FACTS = 5  # words of a result before the best ids: token, bad, stuck, log-probability, log of sum
_UNSIGNED = np.iinfo(np.uint32).max
Words = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One row's result."""

    token: TokenOut
    bad: int  # logits that are not finite; with any of them the token means nothing
    is_stuck: bool  # the mask left no token


class Pending:
    """Results on their way. `tokens` may feed a next step without any wait."""

    def __init__(self, out: Tensor, rows: Sequence[Row]) -> None:
        """Start the copy of `out`, int64 [R, words], to the host."""
        self.tokens = out[:, 0]  # int64 [R], on the device
        self._rows = rows
        self._event: Any = None
        self._host = out
        if out.is_cuda:
            self._host = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
            self._host.copy_(out, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def result(self) -> list[Outcome]:
        """Wait for the copy."""
        if self._event is not None:
            self._event.synchronize()
        words = self._host.numpy()
        reals = words[:, 3:_FACTS].copy().view(np.float64)
        own = reals[:, 0].astype(np.float32).tolist()
        told = zip(words[:, :3].tolist(), own, _best(words, reals[:, 1]), self._rows, strict=True)
        return [
            Outcome(token=_token(id, logprob, best, row), bad=bad, is_stuck=bool(stuck))
            for (id, bad, stuck), logprob, best, row in told
        ]


def launch(logits: Tensor, rows: Sequence[Row]) -> Pending:
    """Enqueue the choice of every row's token on the current stream.

    Args:
        logits: float32 [R, V] with V below 2^24; the same after the launches as before.
        rows: R of them, at least one.
    """
    return Pending(prepared(logits, rows)(), rows)


def prepared(logits: Tensor, rows: Sequence[Row]) -> Callable[[], Tensor]:
    """Send the rows' parameters to the device, beside what the current stream still does; what is
    returned enqueues the launches, as often as it is called, and gives `kernels.run`'s result."""
    if not logits.is_contiguous():
        logits = logits.contiguous()  # rows of an expanded tensor share their memory
    vocab, device = logits.shape[1], logits.device
    changing = [changes_logits(row) for row in rows]
    table = _table(rows, vocab, changing)
    column = {name: table[:, at] for name, at in _AT.items()}
    masked = [i for i, row in enumerate(rows) if row.mask is not None and not is_scripted(row)]
    facts: dict[str, Any] = {
        "most": max(int(column["best"].max()), 0),
        "changed": bool(column["changed"].any()),
        "filtered": bool(
            (column["top_k"] > 0).any() or (column["top_p"].view(np.float64) < 1).any()
        ),
    }
    with _aside(device):
        block = block_of([rows[i].mask or b"" for i in masked], -(-vocab // 8), device)
        column["mask"][masked] = block.places
        lists = _lists([(i, row) for i, row in enumerate(rows) if changing[i]], device)
        for name, values in lists.columns.items():
            column[name][lists.rows] = values
        there = _sent(table, lists, device)
        masks = block.lines.to(device, non_blocking=True)
    sizes = column["size"]
    facts |= {"entries": int(sizes.sum()), "longest": int(sizes.max())}
    if device.type == "cuda":
        current = torch.cuda.current_stream(device)
        current.wait_stream(_side(device))
        for tensor in (there, masks, *lists.fresh):
            tensor.record_stream(current)
    return partial(kernels.run, logits, there, masks, **facts)


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _aside(device: torch.device) -> AbstractContextManager[object]:
    """Where copies to the device do not wait for a pass in progress."""
    return torch.cuda.stream(_side(device)) if device.type == "cuda" else nullcontext()


def _table(rows: Sequence[Row], vocab: int, changing: Sequence[bool]) -> Words:
    """What a batch asks for but masks and changed logits, int64 [R, columns]."""
    s = [row.sampling for row in rows]
    scripted = [is_scripted(row) for row in rows]
    drawn = [x.temperature > 0 and not told for x, told in zip(s, scripted, strict=True)]
    real: dict[str, list[float]] = {
        "temperature": [x.temperature or 1.0 for x in s],
        "top_p": [x.top_p if yes else 1.0 for x, yes in zip(s, drawn, strict=True)],
        "least": [math.log(x.min_p) if x.min_p > 0 else -math.inf for x in s],
        "repetition": [x.repetition for x in s],
        "frequency": [x.frequency for x in s],
        "presence": [x.presence for x in s],
    }
    whole: dict[str, Any] = {
        "key": noise.row_keys(
            [x.seed for x in s], [r.choice for r in rows], [r.position for r in rows]
        ),
        "is_drawn": drawn,
        "script": [
            x.script[row.position] if told and x.script is not None else -1
            for x, row, told in zip(s, rows, scripted, strict=True)
        ],
        "top_k": [
            x.top_k if yes and x.top_k < vocab else 0 for x, yes in zip(s, drawn, strict=True)
        ],
        "best": [-1 if x.logprobs is None else min(x.logprobs, vocab) for x in s],
        "changed": [row.mask is not None or yes for row, yes in zip(rows, changing, strict=True)],
        "is_early": [row.position < row.sampling.min_tokens for row in rows],
        "size": 0,
    }
    table = np.full((len(rows), len(_AT)), -1, dtype=np.int64)
    for name, values in real.items():
        table[:, _AT[name]] = np.array(values, dtype=np.float64).view(np.int64)
    for name, values in whole.items():
        table[:, _AT[name]] = values
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lists:
    """The ids whose logits change, of the rows that have any."""

    rows: list[int]
    columns: dict[str, Words]  # of those rows
    sent: list[tuple[int, Entries]]  # lists that go over with this step: which of `rows`, and it
    fresh: list[Tensor]  # copies that were made now


def _lists(rows: Sequence[tuple[int, Row]], device: torch.device) -> _Lists:
    """Lists that the device keeps, brought up to date by an entry each, and those it does not."""
    sent: list[tuple[int, Entries]] = []
    fresh: list[Tensor] = []
    words: list[tuple[int, int, int, int]] = []
    for number, (_, row) in enumerate(rows):
        history = row.history
        address, place, entry = 0, -1, 0
        if history is None:
            history = History(row.sampling, prompt=row.prompt, tokens=row.counts)
        if row.history is None or len(history.spacious) > MOST_KEPT:
            sent.append((number, history.spacious[: history.size]))
        else:
            if history.kept is None or len(history.late) > 1:
                history.kept = torch.from_numpy(history.spacious).to(device, copy=True)
                fresh.append(history.kept)
            elif history.late:
                place = history.late[0]
                id, what, _ = history.spacious[place].tolist()
                entry = id | what << 32
            address = history.kept.data_ptr()
        history.late.clear()
        words.append((address, history.size, place, entry))
    found = np.array(words, dtype=np.int64).reshape(-1, 4)
    columns = dict(zip(("entries", "size", "place", "entry"), found.T, strict=True))
    columns["saved"] = columns["size"].cumsum() - columns["size"]
    return _Lists(rows=[i for i, _ in rows], columns=columns, sent=sent, fresh=fresh)


def _sent(table: Words, lists: _Lists, device: torch.device) -> Tensor:
    """The table on the device; by the same copy, behind it, entries that are not kept, whose
    address it gets."""
    parts = [entries.reshape(-1) for _, entries in lists.sent]
    first = table.nbytes
    size = first + sum(part.nbytes for part in parts)
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty_like(packed, device=device)
    flat, at = packed.numpy(), first
    for (number, _), part in zip(lists.sent, parts, strict=True):
        table[lists.rows[number], _AT["entries"]] = there.data_ptr() + at
        flat[at : at + part.nbytes] = part.view(np.uint8)
        at += part.nbytes
    flat[:first] = table.reshape(-1).view(np.uint8)
    there.copy_(packed, non_blocking=True)
    return there[:first].view(torch.int64).view(table.shape)


Pairs = list[tuple[int, float]]  # ids and their log-probabilities, best first


def _best(words: Words, total: NDArray[np.float64]) -> list[Pairs]:
    """The best ids of every row, by the log of its sum of exponentials."""
    listed = words[:, _FACTS:]
    if not listed.shape[1]:
        return [[]] * len(words)
    order = listed >> ID_BITS
    bits = np.where(order >> 31, order ^ (1 << 31), _UNSIGNED - order).astype(np.uint32)
    with np.errstate(invalid="ignore"):  # of rows that did not ask
        values = (bits.view(np.float32).astype(np.float64) - total[:, None]).astype(np.float32)
    last = (1 << ID_BITS) - 1
    ids, counts = (last - (listed & last)).tolist(), (listed >= 0).sum(-1).tolist()
    pairs = zip(ids, values.tolist(), counts, strict=True)
    return [list(zip(some[:n], logs[:n], strict=True)) for some, logs, n in pairs]


def _token(id: int, logprob: float, best: Pairs, row: Row) -> TokenOut:
    asked = row.sampling.logprobs
    if asked is None:
        return TokenOut(id=id)
    return TokenOut(id=id, logprob=logprob, top=tuple(best[:asked]))
