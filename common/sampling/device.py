"""Sampling on a GPU: parameters go over in one copy, results come back in one; nothing waits.

The kernels are `common.ops.draw.triton`. Tokens are the definition's (`sampler`): the noise has the
same bits, the sums that decide are of integers, and the arithmetic is float64; only logarithms and
exponentials may differ from a CPU's in their last bit. Log-probabilities agree to float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.contract.messages import TokenOut
from common.ops.draw import triton as kernels
from common.ops.draw.triton_filter import COLUMNS
from common.sampling import noise
from common.sampling.rows import Row, is_adjusted, is_scripted

_AT = {name: i for i, name in enumerate(COLUMNS)}
_FACTS = 5  # words of a result before the best ids: token, bad, stuck, log-probability, log of sum
_UNSIGNED = np.iinfo(np.uint32).max


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
        told = zip(words.tolist(), reals.tolist(), self._rows, strict=True)
        return [
            Outcome(token=_token(word, real, row), bad=word[1], is_stuck=bool(word[2]))
            for word, real, row in told
        ]


def launch(logits: Tensor, rows: Sequence[Row]) -> Pending:
    """Enqueue the choice of every row's token on the current stream.

    Args:
        logits: float32 [R, V] with V below 2^24; the same after the launches as before.
        rows: R of them, at least one.
    """
    return Pending(prepared(logits, rows)(), rows)


def prepared(logits: Tensor, rows: Sequence[Row]) -> Callable[[], Tensor]:
    """Send the rows' parameters to the device; what is returned enqueues the launches, as often as
    it is called, and gives `kernels.run`'s result."""
    if not logits.is_contiguous():
        logits = logits.contiguous()  # rows of an expanded tensor share their memory
    vocab = logits.shape[1]
    host = _host(rows, vocab)
    table, entries, masks = _sent(
        host.table, host.entries, host.masks, -(-vocab // 8), logits.device
    )
    column = {name: host.table[:, at] for name, at in _AT.items()}
    return partial(
        kernels.run, logits, table, entries, masks, most=host.most,
        changed=bool(column["changed"].any()), by_count=bool((column["top_k"] > 0).any()),
        by_mass=bool((column["top_p"].view(np.float64) < 1).any()),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    """What a batch asks for."""

    table: np.ndarray[Any, Any]  # int64 [R, columns]
    entries: np.ndarray[Any, Any]  # int64 [entries, 4]: row, id, what and how often, bias
    masks: list[bytes]  # of the masked rows
    most: int  # best ids of any row


def _host(rows: Sequence[Row], vocab: int) -> _Host:
    s = [row.sampling for row in rows]
    scripted = [is_scripted(row) for row in rows]
    real: dict[str, list[float]] = {
        "temperature": [x.temperature or 1.0 for x in s],
        "top_p": [x.top_p for x in s],
        "least": [math.log(x.min_p) if x.min_p > 0 else -math.inf for x in s],
        "repetition": [x.repetition for x in s],
        "frequency": [x.frequency for x in s],
        "presence": [x.presence for x in s],
    }
    drawn = [x.temperature > 0 and not told for x, told in zip(s, scripted, strict=True)]
    masked = [i for i, row in enumerate(rows) if row.mask is not None and not scripted[i]]
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
        "changed": [is_adjusted(row) for row in rows],
    }
    real["top_p"] = [p if yes else 1.0 for p, yes in zip(real["top_p"], drawn, strict=True)]
    table = np.full((len(rows), len(_AT)), -1, dtype=np.int64)
    for name, values in real.items():
        table[:, _AT[name]] = np.array(values, dtype=np.float64).view(np.int64)
    for name, values in whole.items():
        table[:, _AT[name]] = values
    table[masked, _AT["mask"]] = np.arange(len(masked))
    masks = [rows[i].mask or b"" for i in masked]
    parts = [_entries(i, row, vocab) for i, row in enumerate(rows) if is_adjusted(row)]
    entries = np.concatenate([np.empty((0, 4), dtype=np.int64), *parts])
    most = max(int(table[:, _AT["best"]].max()), 0)
    return _Host(table=table, entries=entries, masks=masks, most=most)


def _entries(number: int, row: Row, vocab: int) -> np.ndarray[Any, Any]:
    """The ids of a row whose logits change, int64 [ids, 4]."""
    s = row.sampling
    counts = row.counts if s.presence or s.frequency else {}
    seen = (*row.counts, *row.prompt) if s.repetition != 1 else ()
    banned = s.stop_ids if row.position < s.min_tokens else ()
    bias = s.logit_bias
    lists = [np.fromiter(x, np.int64, len(x)) for x in (bias, banned, seen, counts)]
    ids = np.unique(np.concatenate(lists))
    made = np.zeros((len(ids), 4), dtype=np.int64)
    made[:, 0], made[:, 1] = number, ids
    bits = (kernels.HAS_BIAS, kernels.IS_BANNED, kernels.IS_SEEN, kernels.IS_COUNTED)
    places = [np.searchsorted(ids, listed) for listed in lists]
    for bit, place in zip(bits, places, strict=True):
        made[place, 2] |= bit
    made[places[3], 2] |= np.fromiter(counts.values(), np.int64, len(counts)) << 8
    made[places[0], 3] = np.fromiter(bias.values(), np.float64, len(bias)).view(np.int64)
    return made[(ids >= 0) & (ids < vocab)]


def _sent(
    table: np.ndarray[Any, Any], entries: np.ndarray[Any, Any], masks: Sequence[bytes],
    mask_bytes: int, device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Table, entries and masks uint8 [masks, mask_bytes] on the device, by one copy."""
    sizes = [table.nbytes, entries.nbytes, len(masks) * mask_bytes]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    flat = packed.numpy()
    first, second = sizes[0], sizes[0] + sizes[1]
    flat[:first] = table.reshape(-1).view(np.uint8)
    flat[first:second] = entries.reshape(-1).view(np.uint8)
    lines = flat[second:].reshape(len(masks), mask_bytes)
    for line, mask in zip(lines, masks, strict=True):
        bits = np.frombuffer(mask, dtype=np.uint8)[:mask_bytes]
        line[: len(bits)] = bits
        line[len(bits) :] = 0
    sent = packed.to(device, non_blocking=True).split(sizes)
    return (
        sent[0].view(torch.int64).view(table.shape),
        sent[1].view(torch.int64).view(entries.shape),
        sent[2].view(len(masks), mask_bytes),
    )


def _token(word: list[int], real: list[float], row: Row) -> TokenOut:
    if row.sampling.logprobs is None:
        return TokenOut(id=word[0])
    listed = [x for x in word[_FACTS : _FACTS + row.sampling.logprobs] if x >= 0]
    last = (1 << kernels.ID_BITS) - 1
    order = np.array(listed, dtype=np.int64) >> kernels.ID_BITS
    bits = np.where(order >> 31, order ^ (1 << 31), _UNSIGNED - order).astype(np.uint32)
    values = (bits.view(np.float32).astype(np.float64) - real[1]).astype(np.float32).tolist()
    top = tuple((last - (x & last), value) for x, value in zip(listed, values, strict=True))
    return TokenOut(id=word[0], logprob=float(np.float32(real[0])), top=top)
