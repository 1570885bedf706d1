"""What a decode room holds for one request: a reservation first, running choices later.

Prompt pages that are full are shared by all choices through their reference counts; each choice
has its own last prompt page and its own pages for the answer. Nothing here runs a model.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from common.cache.mla_pool import pages_of
from common.config.spec import CHUNK
from common.contract.messages import Accepted, DecodeJob, Done, PullJob, Reserve
from common.errors import CapacityError, InvalidRequest
from common.grammar.library import Matcher
from common.model.batch import Share
from common.ops.digest import Signature
from common.runtime.loop import promise
from common.runtime.memory import TextMemory
from common.runtime.place import Place
from common.sampling.history import History
from common.sampling.masks import Mask
from common.sampling.sampler import Row, is_scripted_at


@dataclass(slots=True, eq=False)
class Choice:
    """One answer being written."""

    index: int
    slot: int
    pages: tuple[int, ...]  # shared ones first
    tokens: list[int]  # emitted, and forced ones on a replay
    history: History  # the same tokens, counted
    fed: int = 0  # of them, how many the state absorbed
    last_step: int = 0
    finish: str = ""
    matcher: Matcher | None = None  # stands after `tokens`


@dataclass(slots=True, eq=False)
class Pull:
    """An offer that is READ into a reservation before its seal came. Nothing of it is used."""

    job: PullJob
    told: Future[Done]  # the router's answer
    arrived: Future[Callable[[], Signature]] = field(default_factory=promise)  # says what did
    is_given_up: bool = False


@dataclass(slots=True, eq=False)
class Held:
    """A reservation, and the request that came for it."""

    reserve: Reserve
    caller: str
    memory: TextMemory  # whose slots and pages these are
    slots: tuple[int, ...]  # one a choice, then the canary's
    shared_pages: tuple[int, ...]
    own_pages: tuple[tuple[int, ...], ...]
    expires: float
    id: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    stage: str = "reserved"  # then fetching, running, ended
    writers: int = 0  # a READ and its thread, which may still write into slots and pages
    pull: Pull | None = None
    job: DecodeJob | None = None
    deadline: float = float("inf")
    is_paused: bool = False  # its client does not read
    accepted: Future[Accepted] = field(default_factory=promise)
    choices: list[Choice] = field(default_factory=list)
    matcher: Matcher | None = None  # stands at the answer's beginning

    @property
    def canary_slot(self) -> int:
        """The slot for the state before the last prompt token, -1 without a canary."""
        return self.slots[-1] if self.reserve.canary else -1

    @property
    def prompt_pages(self) -> tuple[int, ...]:
        """Pages that the hand-off fills: the shared ones and the first choice's partial one."""
        count = pages_of(self.reserve.prompt_tokens)
        return (self.shared_pages + self.own_pages[0])[:count]

    @property
    def prompt_place(self) -> Place:
        """Where the hand-off lands."""
        return Place(
            slot=self.slots[0],
            pages=self.prompt_pages,
            tokens=self.reserve.prompt_tokens,
            canary_slot=self.canary_slot,
        )

    def num_pages(self) -> int:
        """Pages held, each counted once."""
        return len(self.shared_pages) + sum(map(len, self.own_pages))


def reserve(message: Reserve, caller: str, memory: TextMemory, lease_s: float) -> Held:
    """Take slots and pages for a whole request: prompt and answer.

    Raises:
        InvalidRequest: it could never fit.
        CapacityError: it does not fit now.
    """
    tokens = message.prompt_tokens + message.max_tokens - 1  # the last one is never fed
    shared = message.prompt_tokens // CHUNK
    own = max(0, pages_of(tokens) - shared)
    slots, pages = message.n + message.canary, shared + message.n * own
    if slots > memory.slots.total or pages > memory.pages.total:
        raise InvalidRequest(
            f"{message.prompt_tokens} prompt tokens and {message.n} x {message.max_tokens} answer "
            f"tokens need {slots} slots and {pages} pages; a decode replica has "
            f"{memory.slots.total} and {memory.pages.total}: ask for fewer tokens or choices",
            param="max_tokens",
        )
    if slots > memory.slots.free or pages > memory.pages.free:
        raise CapacityError(f"{slots} slots and {pages} pages are not free in this replica now")
    taken = memory.pages.take(pages)
    return Held(
        reserve=message,
        caller=caller,
        memory=memory,
        slots=memory.slots.take(slots),
        shared_pages=taken[:shared],
        own_pages=tuple(
            taken[shared + own * choice : shared + own * (choice + 1)]
            for choice in range(message.n)
        ),
        expires=time.monotonic() + lease_s,
    )


def reserve_in_a_lane(
    message: Reserve, caller: str, lanes: Sequence[TextMemory], lease_s: float
) -> Held:
    """The same in the lane with the most free slots where it fits; errors as of `reserve`."""
    *others, last = sorted(lanes, key=lambda memory: -memory.slots.free)
    for memory in others:
        with suppress(CapacityError):
            return reserve(message, caller, memory, lease_s)
    return reserve(message, caller, last, lease_s)


def give_back(held: Held) -> None:
    """Return everything; only when nobody may write there any more."""
    memory = held.memory
    assert not held.writers, "memory of a READ in progress must not be given back"
    memory.slots.give(held.slots)
    memory.pages.give(held.shared_pages)
    for pages in held.own_pages:
        memory.pages.give(pages)


def share_of(held: Held, choice: Choice) -> Share:
    """The choice's token of the next step."""
    return Share(
        slot=choice.slot,
        pages=choice.pages,
        start=held.reserve.prompt_tokens + choice.fed,
        token_ids=(choice.tokens[choice.fed],),
        want_logits=choice.fed + 1 == len(choice.tokens),
        lane=held.memory.lane,
    )


def position_of(held: Held, choice: Choice) -> Matcher | None:
    """Where its next token's mask comes from; None without a grammar, and while a script speaks."""
    assert held.job is not None
    is_told = is_scripted_at(held.job.sampling, len(choice.tokens))
    return None if is_told else choice.matcher


def row_of(held: Held, choice: Choice, mask: Mask | None) -> Row:
    """What sampling its next token needs to know."""
    assert held.job is not None
    return Row(
        sampling=held.job.sampling,
        choice=choice.index,
        position=len(choice.tokens),
        counts=choice.history.counts,
        prompt=choice.history.prompt,
        history=choice.history,
        mask=mask,
    )
