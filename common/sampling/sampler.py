"""Choose one token a row from logits.

The only place that knows what the fields of `Sampling` mean. It holds nothing between calls: a row
brings its position and its counts along. It does not stop a request and knows no text.

Order: logit_bias, min_tokens, repetition, frequency and presence, the grammar's mask, temperature,
top_k, top_p, min_p. A scripted token is above all of them, the mask included.
Log-probabilities are those of the model: the log-softmax of the raw logits, before any of these.

A row's result is bit for bit the same alone and in any batch. On a CPU that is by construction: the
rows are computed one at a time (a vectorised loop rounds its tail differently). On a GPU `device`
cuts a row into tiles of a fixed size and adds up integers where a sum decides; without Triton rows
share torch's kernels, and only those whose result for a row cannot depend on the number of rows:
element-wise ones, log-softmax, stable sort, arg max, and sums and scans of integers. Hence top_p
adds up probabilities in fixed point.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from common.contract.messages import Sampling, TokenOut
from common.errors import DeadEnd, PoisonedState, ServingError
from common.sampling import noise
from common.sampling.masks import Mask
from common.sampling.rows import Row, is_adjusted, is_scripted, is_scripted_at

__all__ = ["Row", "is_scripted_at", "mask_of", "sample", "unpack"]

_FIXED_POINT = 2.0**40  # the best id's weight; the sum over 2**22 such ids still fits in int64
_NEVER = float("-inf")


class Masking(Protocol):
    """A position in a grammar."""

    def mask(self) -> bytes: ...


def mask_of(sampling: Sampling, position: int, matcher: Masking | None) -> bytes | None:
    """The mask for the token at `position`; None without a grammar, and while a script speaks."""
    if matcher is None or is_scripted_at(sampling, position):
        return None
    return matcher.mask()


def sample(logits: Tensor, rows: Sequence[Row]) -> list[TokenOut | ServingError]:
    """Choose the next token of every row.

    Args:
        logits: float32 [R, V], as the model made them; not changed.
        rows: R rows. A non-zero `temperature` draws with noise keyed by (seed, choice, position);
            0 takes the best, of equals the lowest id. While `position < len(script)` the token is
            `script[position]`; its log-probability still comes from the logits.

    Returns:
        One result a row: a token (with log-probabilities where `sampling.logprobs` is set), or an
        error to be raised for that row alone: a `PoisonedState` when any of its logits is not
        finite, a `DeadEnd` when its mask leaves no token.

    Raises:
        ValueError: the logits' shape or dtype is not the above.

    The results are Python numbers: this waits for the device.
    """
    if logits.dtype != torch.float32 or logits.ndim != 2 or logits.shape[0] != len(rows):
        found = f"{logits.dtype} {tuple(logits.shape)}"
        raise ValueError(f"logits are {found}; float32 [{len(rows)}, vocab] is needed")
    if not rows:
        return []
    if logits.is_cuda and find_spec("triton") is not None:
        return _on_device(logits, rows)
    if logits.device.type == "cpu" and not all(_is_plain(row) for row in rows):
        alone = (logits[i : i + 1] for i in range(len(rows)))
        return [_together(one, [row])[0] for one, row in zip(alone, rows, strict=True)]
    return _together(logits, rows)


def _on_device(logits: Tensor, rows: Sequence[Row]) -> list[TokenOut | ServingError]:
    """Sample rows by the kernels."""
    from common.sampling.device import launch

    results: list[TokenOut | ServingError] = []
    for outcome, row in zip(launch(logits, rows).result(), rows, strict=True):
        if outcome.bad:
            results.append(_poisoned(outcome.bad, logits.shape[1], row))
        else:
            results.append(_dead_end(row) if outcome.is_stuck else outcome.token)
    return results


def _together(logits: Tensor, rows: Sequence[Row]) -> list[TokenOut | ServingError]:
    """Sample rows in one go."""
    low, high = torch.aminmax(logits, dim=-1)  # both carry a NaN through
    healthy = low.isfinite() & high.isfinite()
    chosen, stuck = _choose(logits, rows)
    tokens = _tokens(logits, chosen, rows, healthy)
    results: list[TokenOut | ServingError] = []
    for i, (token, is_healthy) in enumerate(zip(tokens, healthy.tolist(), strict=True)):
        if not is_healthy:
            bad = int((~logits[i].isfinite()).sum())
            results.append(_poisoned(bad, logits.shape[1], rows[i]))
        else:
            results.append(_dead_end(rows[i]) if i in stuck else token)
    return results


def _is_plain(row: Row) -> bool:
    """Whether the arg max of the raw logits is all that is asked for."""
    s = row.sampling
    is_bare = s.temperature == 0 and s.logprobs is None
    return is_bare and not is_scripted(row) and not is_adjusted(row)


def _choose(logits: Tensor, rows: Sequence[Row]) -> tuple[Tensor, set[int]]:
    """The chosen id of each row, int64 [R], and the rows whose masks left none.

    Rows with bad logits, or without a token left, get any id.
    """
    adjusted = logits
    if any(is_adjusted(row) for row in rows):
        adjusted = logits.clone()
        for i, row in enumerate(rows):
            _adjust(adjusted[i], row)
    stuck = _stuck(adjusted, rows)
    chosen = adjusted.argmax(-1)
    if any(row.sampling.temperature > 0 and not is_scripted(row) for row in rows):
        is_drawn = torch.tensor(
            [row.sampling.temperature > 0 for row in rows], device=logits.device
        )
        chosen = torch.where(is_drawn, _draw(adjusted, rows), chosen)
    for i, row in enumerate(rows):
        if is_scripted(row):
            assert row.sampling.script is not None
            chosen[i] = row.sampling.script[row.position]
    return chosen, stuck


def _stuck(adjusted: Tensor, rows: Sequence[Row]) -> set[int]:
    """Masked rows without a token left; their logits are made plain again, so that no NaN comes."""
    masked = [i for i, row in enumerate(rows) if row.mask is not None and not is_scripted(row)]
    if not masked:
        return set()
    best: list[float] = adjusted.amax(-1).tolist()
    stuck = {i for i in masked if best[i] == _NEVER}
    for i in stuck:
        adjusted[i] = 0.0
    return stuck


def unpack(mask: Mask, vocab: int, device: torch.device) -> Tensor:
    """A mask of bits as bool [vocab]; ids beyond its end are not allowed."""
    packed = torch.frombuffer(bytearray(bytes(mask)), dtype=torch.uint8).to(device)
    bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=device)) & 1
    allowed = bits.flatten()[:vocab].bool()
    return torch.nn.functional.pad(allowed, (0, vocab - allowed.shape[0]))


def _adjust(logits: Tensor, row: Row) -> None:
    """Apply bias, minimum length and penalties to one row [V] in place."""
    s, vocab, device = row.sampling, logits.shape[0], logits.device

    def index(ids: Collection[int]) -> Tensor:
        """Ids as a tensor. An id outside the vocabulary cannot be chosen, so nothing is lost."""
        return torch.tensor([i for i in ids if 0 <= i < vocab], dtype=torch.int64, device=device)

    if s.logit_bias:
        bias = {i: value for i, value in s.logit_bias.items() if 0 <= i < vocab}
        logits[index(bias)] += torch.tensor(list(bias.values()), device=device)
    if row.position < s.min_tokens:
        logits[index(s.stop_ids)] = _NEVER
    if s.repetition != 1:
        seen = index({*row.counts, *row.prompt})
        value = logits[seen]
        logits[seen] = torch.where(value > 0, value / s.repetition, value * s.repetition)
    if (s.presence or s.frequency) and row.counts:
        seen = index(row.counts)
        count = torch.tensor([row.counts[i] for i in row.counts if 0 <= i < vocab], device=device)
        logits[seen] -= s.frequency * count + s.presence
    if row.mask is not None and not is_scripted(row):
        logits.masked_fill_(~unpack(row.mask, vocab, device), _NEVER)


def _draw(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Draw by the Gumbel trick: filters first, then the arg max of logits and noise; int64 [R]."""
    device = logits.device
    temperature = _column([row.sampling.temperature or 1.0 for row in rows], device)
    scaled = logits.double() / temperature  # [R, V]
    scaled -= scaled.amax(-1, keepdim=True)
    if any(row.sampling.top_k or row.sampling.top_p < 1 for row in rows):
        scaled.masked_fill_(~_nucleus(scaled, rows), _NEVER)
    if any(row.sampling.min_p > 0 for row in rows):
        least = _column(
            [row.sampling.min_p for row in rows], device
        ).log()  # log 0 keeps everything
        scaled.masked_fill_(scaled < least, _NEVER)
    keys = torch.tensor(
        [noise.row_key(seed=r.sampling.seed, choice=r.choice, position=r.position) for r in rows],
        dtype=torch.int64,
        device=device,
    )
    return (noise.gumbel(keys, logits.shape[1]) + scaled).argmax(-1)


def _nucleus(scaled: Tensor, rows: Sequence[Row]) -> Tensor:
    """Which ids top_k and then top_p leave, as bool [R, V].

    top_k keeps exactly k ids, of equals the lowest. top_p looks at what top_k left and keeps the
    fewest ids, best first, whose share of it reaches top_p: at least one.
    """
    device, vocab = scaled.device, scaled.shape[1]
    best, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=device)
    top_k = torch.tensor([[row.sampling.top_k or vocab] for row in rows], device=device)
    weight = (best.exp() * _FIXED_POINT).round().long().masked_fill_(rank >= top_k, 0)
    before = weight.cumsum(-1) - weight  # mass of all better ids
    top_p = _column([row.sampling.top_p for row in rows], device)
    within = (before < weight.sum(-1, keepdim=True) * top_p) | (top_p >= 1)
    keep = within & (rank < top_k)
    return torch.zeros_like(keep).scatter_(-1, order, keep)


def _column(values: list[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]


def _tokens(logits: Tensor, chosen: Tensor, rows: Sequence[Row], healthy: Tensor) -> list[TokenOut]:
    """The chosen ids [R] with what `logprobs` asks for; `logits` are the raw ones [R, V]."""
    ids: list[int] = chosen.tolist()
    asked = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
    tokens = [TokenOut(id=token) for token in ids]
    if not asked:
        return tokens
    if len(asked) < len(rows):
        index = torch.tensor(asked, device=logits.device)
        logits, chosen, healthy = logits[index], chosen[index], healthy[index]
    logits = logits.masked_fill(~healthy[:, None], 0.0)  # a NaN would have no place among the best
    scores = logits.log_softmax(-1)
    own: list[float] = scores.gather(1, chosen[:, None])[:, 0].tolist()
    most = min(max(rows[i].sampling.logprobs or 0 for i in asked), logits.shape[1])
    best = _best(logits, most)
    tops = zip(best.tolist(), scores.gather(1, best).tolist(), strict=True)
    for i, logprob, (top, values) in zip(asked, own, tops, strict=True):
        k = rows[i].sampling.logprobs or 0
        pairs = tuple(zip(top[:k], values[:k], strict=True))
        tokens[i] = TokenOut(id=ids[i], logprob=logprob, top=pairs)
    return tokens


def _best(logits: Tensor, k: int) -> Tensor:
    """The k best ids of every row, best first, of equals the lowest; int64 [R, k].

    `topk` leaves open which of equals it takes, so it only tells the least value.
    """
    if k == 0:
        return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    least = logits.topk(k).values[:, -1:]
    above, level = logits > least, logits == least
    room = k - above.sum(-1, keepdim=True)
    taken = above | (level & (level.cumsum(-1) <= room))
    ids = taken.nonzero()[:, 1].view(-1, k)  # ascending
    order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, order)


def _poisoned(bad: int, vocab: int, row: Row) -> PoisonedState:
    return PoisonedState(
        f"{bad} of {vocab} logits are not finite at token {row.position} of choice "
        f"{row.choice}; its state cannot be trusted, send the request again"
    )


def _dead_end(row: Row) -> DeadEnd:
    return DeadEnd(
        f"the grammar of the answer allows no token at position {row.position} of choice "
        f"{row.choice}; the request was ended"
    )
