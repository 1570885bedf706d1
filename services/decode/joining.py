"""From a verified hand-off to running choices: copies for n > 1, the replay's tokens, the canary.

Runs in the engine's thread, between two steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.config.spec import CHUNK
from common.contract.finish import finish_of
from common.contract.messages import DecodeJob
from common.grammar.library import Matcher
from common.model.batch import Forward, Share, StepBatch
from common.runtime.memory import TextMemory
from common.sampling.history import History
from services.decode.held import Choice, Held


def join(held: Held, job: DecodeJob, memory: TextMemory) -> list[Choice]:
    """Make the choices of a request whose memory was verified.

    The first choice's slot and pages were filled by the READ; the others get copies of the slot and
    of the last partial page. Tokens a choice emitted before (a replay) go first; they will be fed
    without being emitted again. A choice that its first token ended is returned finished.
    """
    total, shared = held.reserve.prompt_tokens, held.shared_pages
    memory.states.begin(held.slots[0], held.id, tokens=total, zero=False)
    prompt = frozenset(job.token_ids) if job.sampling.repetition != 1 else frozenset()
    choices = []
    for index in range(held.reserve.n):
        slot, own = held.slots[index], held.own_pages[index]
        if index:
            memory.copy_slot(held.slots[0], slot)
            if total % CHUNK:
                memory.copy_page(held.own_pages[0][0], own[0])
        forced = job.forced[index] if job.forced else ()
        tokens = list(forced) or [job.ticket.seal.first[index].id]
        choices.append(
            Choice(
                index=index,
                slot=slot,
                pages=shared + own,
                tokens=tokens,
                history=History(job.sampling, prompt=prompt, tokens=tokens),
                finish=finish_of(job.sampling, tokens[-1], len(tokens)),
                matcher=_placed(held.matcher, tokens),
            )
        )
    return choices


def _placed(start: Matcher | None, tokens: Sequence[int]) -> Matcher | None:
    """A matcher of the choice's own, behind what the choice has emitted."""
    if start is None:
        return None
    matcher = start.copy()
    matcher.take(*tokens)
    return matcher


def canary_difference(held: Held, job: DecodeJob, model: Forward, memory: TextMemory) -> float:
    """Compute the last prompt token again from the state before it; how far the logits differ.

    Returns:
        The largest difference over the logits prefill named, NaN when one is not finite.
    """
    total = held.reserve.prompt_tokens
    pages = held.prompt_pages
    last_page, row = pages[-1], (total - 1) % CHUNK
    memory.states.begin(held.canary_slot, held.id, tokens=total - 1, zero=False)
    memory.keep_row(last_page, row)  # the step writes it again
    share = Share(
        slot=held.canary_slot,
        pages=pages,
        start=total - 1,
        token_ids=(job.token_ids[-1],),
        lane=memory.lane,
    )
    own = memory.lanes[0].tensors  # the process's; the share says whose it means
    logits = model.forward(StepBatch(kind="steps", shares=(share,)), own)[0]
    memory.restore_row(last_page, row)
    top = job.ticket.seal.canary_top
    if not top:
        return float("nan")
    signed = torch.tensor([logit for _, logit in top], device=logits.device)
    found = logits[[token for token, _ in top]]
    return float((found - signed).abs().max())  # NaN if any is
