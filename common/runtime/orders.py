"""Orders: what a leader tells its ranks and what they answer; msgpack, tagged, strict.

A pass over the model is plain data here, so that every rank runs the same one. Nothing is executed.
Longer than 300 lines because every word that is spoken inside a group stands in one list.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import torch

from common.contract.messages import Endpoint, Sampling, TokenOut
from common.contract.regions import Agent, PoolInfo, Span
from common.model.batch import Share, StepBatch
from common.runtime.place import Place

VERSION = 4


class Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of everything that travels inside a group."""


class Join(Order, frozen=True, kw_only=True):
    """First word of a rank: who it is and what it loads."""

    version: int
    secret: str
    rank: int
    world: int
    model_print: str
    layout_print: str  # of the whole model, and of its pools: all ranks have the same


class Welcome(Order, frozen=True, kw_only=True):
    """The leader's answer when all ranks are there: where their collectives meet."""

    store_host: str
    store_port: int
    lineage: str  # names this life of the group in the store


class Turned(Order, frozen=True, kw_only=True):
    """The leader's answer to a rank that does not belong; the rank ends."""

    reason: str


class Ping(Order, frozen=True, kw_only=True):
    """Are you there?"""


class Pong(Order, frozen=True, kw_only=True):
    """Yes. Sent beside the computation, so a long pass is not silence; also when a READ failed."""

    quarantined: int = 0  # READs here that outlived their request
    is_full: bool = False  # they have reached the bound: only the end of this process frees them


class ShareOrder(Order, frozen=True, kw_only=True):
    """A `Share`; image rows travel as bytes of the model's dtype."""

    slot: int
    pages: tuple[int, ...]
    start: int
    token_ids: tuple[int, ...]
    want_logits: bool = True
    embeds: bytes = b""
    embed_at: tuple[int, ...] = ()


class Pass(Order, frozen=True, kw_only=True):
    """One pass of all ranks: for each lane its shares, none for an idle one."""

    kind: str
    lanes: tuple[tuple[ShareOrder, ...], ...]
    keep: bool = False  # logits stay with their lanes, for `Choose`


class RowOrder(Order, frozen=True, kw_only=True):
    """A `Row` of sampling."""

    sampling: Sampling
    choice: int
    position: int
    counts: dict[int, int] = {}
    prompt: tuple[int, ...] = ()
    mask: bytes | None = None


class Choose(Order, frozen=True, kw_only=True):
    """Choose tokens from the logits that the pass before left here; answered by `Chosen`."""

    number: int
    rows: tuple[RowOrder, ...]


class Chosen(Order, frozen=True, kw_only=True):
    """The rows' tokens in order; `faults` are those without one: their place, code and text."""

    number: int
    tokens: tuple[TokenOut, ...]
    faults: dict[int, tuple[str, str]] = {}


class Here(Order, frozen=True, kw_only=True):
    """A rank's pools are registered: how other processes reach them."""

    agent: Agent
    experts: tuple[PoolInfo, ...] = ()  # where experts move


class Agents(Order, frozen=True, kw_only=True):
    """How the experts of every rank are reached, the leader's first."""

    agents: tuple[Agent, ...]


class Fetch(Order, frozen=True, kw_only=True):
    """READ experts of a layer beside the weights; answered by `Measured`."""

    number: int
    layer: int
    places: tuple[tuple[int, int], ...]  # rank, and place there


class Weigh(Order, frozen=True, kw_only=True):
    """Digest experts that others READ; answered by `Measured`."""

    number: int
    layer: int
    places: tuple[int, ...]


class Commit(Order, frozen=True, kw_only=True):
    """Use what was fetched from the next pass on; answered by `Ended`."""

    number: int
    layer: int
    places: tuple[int, ...]
    shares: tuple[tuple[int, ...], ...]  # the layer's new placement


class Count(Order, frozen=True, kw_only=True):
    """How often was each expert chosen? Answered by `Counted`."""

    number: int


class Counted(Order, frozen=True, kw_only=True):
    """Rows by layer and expert since the start."""

    number: int
    rows: list[list[int]]


class Mirrored(Order, frozen=True, kw_only=True):
    """What happens inside the pools on the leader too: a method of `TextMemory` by name."""

    what: str
    numbers: tuple[int, ...]


class Pull(Order, frozen=True, kw_only=True):
    """READ (local, remote) spans into a place and digest them; answered by `Ended` and `Freed`."""

    number: int
    place: Place
    sources: tuple[tuple[Endpoint, tuple[tuple[Span, Span], ...]], ...]
    deadline_s: float


class Abandon(Order, frozen=True, kw_only=True):
    """Give a READ up; its destination stays in quarantine until it ended."""

    number: int


class Ended(Order, frozen=True, kw_only=True):
    """How a READ ended for the request: what arrived, or the error's `code`."""

    number: int
    code: str = ""
    text: str = ""
    sums: dict[str, int] = {}
    unsound: tuple[str, ...] = ()


class Freed(Order, frozen=True, kw_only=True):
    """Nobody writes into the READ's destination any more."""

    number: int


class Sign(Order, frozen=True, kw_only=True):
    """Digest what the passes before it made of a request; answered by `Measured`, in its turn."""

    number: int
    place: Place  # full pages were signed when they were filled


class Measured(Order, frozen=True, kw_only=True):
    """A rank's signature."""

    number: int
    sums: dict[str, int]
    unsound: tuple[str, ...]


class Failed(Order, frozen=True, kw_only=True):
    """A rank's last word: why it ends."""

    reason: str


AnyOrder = (
    Join
    | Welcome
    | Turned
    | Ping
    | Pong
    | Pass
    | Choose
    | Chosen
    | Here
    | Agents
    | Fetch
    | Weigh
    | Commit
    | Count
    | Counted
    | Mirrored
    | Pull
    | Abandon
    | Ended
    | Freed
    | Sign
    | Measured
    | Failed
)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyOrder)


def encode(order: Order) -> bytes:
    """An order's bytes."""
    return _encoder.encode(order)


def decode(raw: bytes) -> Order:
    """Bytes' order; msgspec.ValidationError where they are none."""
    order: Order = _decoder.decode(raw)
    return order


def order_of(kind: str, lanes: tuple[tuple[Share, ...], ...], *, keep: bool = False) -> Pass:
    """A pass as an order."""
    shares = tuple(tuple(map(_share_order, lane)) for lane in lanes)
    return Pass(kind=kind, lanes=shares, keep=keep)


def batch_of(order: Pass, lane: int, hidden: int, dtype: torch.dtype) -> StepBatch | None:
    """A lane's batch of an ordered pass; None where the lane is idle."""
    shares = tuple(_share(share, hidden, dtype) for share in order.lanes[lane])
    return StepBatch(kind=order.kind, shares=shares) if shares else None


def layout_of(whole: str, *, slots: int, pages: int, mesh: object) -> str:
    """What all ranks of a group must agree on beside the model: layout, pools and mesh."""
    facts = f"{whole} {slots} {pages} {mesh}".encode()
    return hashlib.blake2b(facts, digest_size=16).hexdigest()


def _share_order(share: Share) -> ShareOrder:
    rows = share.embeds
    return ShareOrder(
        slot=share.slot,
        pages=share.pages,
        start=share.start,
        token_ids=share.token_ids,
        want_logits=share.want_logits,
        embeds=b"" if rows is None else _bytes(rows),
        embed_at=share.embed_at,
    )


def _share(order: ShareOrder, hidden: int, dtype: torch.dtype) -> Share:
    rows = None
    if order.embeds:
        raw = torch.frombuffer(bytearray(order.embeds), dtype=torch.uint8)
        rows = raw.view(dtype).view(-1, hidden)
    return Share(
        slot=order.slot,
        pages=order.pages,
        start=order.start,
        token_ids=order.token_ids,
        want_logits=order.want_logits,
        embeds=rows,
        embed_at=order.embed_at,
    )


def _bytes(rows: torch.Tensor) -> bytes:
    return bytes(rows.contiguous().cpu().view(torch.uint8).numpy().tobytes())
