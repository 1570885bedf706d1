"""Rows that are sampled in another process: as plain data there, results and faults back."""

from __future__ import annotations

import torch

from common.contract.grammar import Grammar
from common.contract.messages import Sampling, TokenOut
from common.errors import DeadEnd, PoisonedState
from common.runtime.choosing import chosen, results_of, row_order
from common.runtime.orders import Choose, decode, encode
from common.sampling.sampler import Row, sample

VOCAB = 40
DRAWN = Sampling(temperature=0.8, seed=3, top_p=0.9, logprobs=4)
PENALISED = Sampling(temperature=1.0, seed=4, repetition=1.3, frequency=0.5, min_tokens=9)
FORMED = Sampling(temperature=0.0, logprobs=0, grammar=Grammar.of('start: "x"'))
ROWS = [
    Row(sampling=DRAWN, choice=1, position=2, counts={7: 1}, prompt=frozenset({1, 2})),
    Row(sampling=PENALISED, position=5, counts={3: 4, 9: 1}, prompt=frozenset({1, 2, 30})),
    Row(sampling=FORMED, position=1, mask=bytes([0b10010, 0, 0, 0, 1])),
    Row(sampling=FORMED, position=1, mask=bytes(5)),
    Row(sampling=DRAWN, position=3),
    Row(sampling=Sampling(script=(11, 12)), position=1),
]


def test_rows_give_elsewhere_what_they_give_here() -> None:
    logits = torch.randn(len(ROWS), VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    logits[4, 0] = torch.nan
    order = decode(encode(Choose(number=5, rows=tuple(map(row_order, ROWS)))))
    told = decode(encode(chosen(order, logits)))
    assert told.number == 5
    found, wanted = results_of(told), sample(logits, ROWS)
    assert [type(result) for result in found] == [type(result) for result in wanted]
    assert [str(result) for result in found] == [str(result) for result in wanted]
    assert isinstance(found[3], DeadEnd) and isinstance(found[4], PoisonedState)
    assert isinstance(found[5], TokenOut) and found[5].id == 12


def test_what_no_penalty_looks_at_does_not_travel() -> None:
    drawn, penalised, formed, *_ = map(row_order, ROWS)
    assert not drawn.counts and not drawn.prompt
    assert penalised.counts == {3: 4, 9: 1} and set(penalised.prompt) == {1, 2, 30}
    assert formed.sampling.grammar is None and formed.mask == ROWS[2].mask
