"""Every message between the router and the rooms: msgpack, tagged, strict, versioned.

Longer than 300 lines because the whole contract stands on one page, but for tickets (`tickets.py`)
and what a room says of itself (`reports.py`), which are imported from here like the rest.

A message that has an unknown field, lacks one, or has a value of another type is refused while
decoding. `VERSION` is exchanged in `Hello`; peers of another version are refused there. Durations
are seconds; a deadline is the time left when the message was sent, since clocks of hosts differ.
"""

from __future__ import annotations

import msgspec

from common.contract.base import Message as Message
from common.contract.grammar import Grammar
from common.contract.regions import Agent, PoolInfo
from common.contract.reports import Cached as Cached
from common.contract.reports import Holdings as Holdings
from common.contract.reports import Inventory as Inventory
from common.contract.reports import Load as Load
from common.contract.reports import Ping as Ping
from common.contract.tickets import CacheTicket as CacheTicket
from common.contract.tickets import EmbedPart as EmbedPart
from common.contract.tickets import EmbedTicket as EmbedTicket
from common.contract.tickets import Offer as Offer
from common.contract.tickets import Part as Part
from common.contract.tickets import Seal as Seal
from common.contract.tickets import TokenOut as TokenOut

VERSION = 3


class Endpoint(Message, frozen=True, kw_only=True):
    """A replica: who it is, since when, where it listens, and what its memory looks like."""

    room: str  # "encoder", "prefill" or "decode"
    id: str
    epoch: int  # new at every start of the replica
    host: str
    port: int
    agent: str  # NIXL agent name
    agent_metadata: bytes
    pools: tuple[PoolInfo, ...]
    model_print: str
    layout_print: str
    ranks: tuple[Agent, ...] = ()  # of a group, beside the leader: rank r is ranks[r - 1]


class Hello(Message, frozen=True, kw_only=True):
    """First message of a connection, from the caller. The reply is the callee's `Endpoint`."""

    version: int
    secret: str
    caller: str  # "router:<id>" or "<room>:<id>"


class Sampling(Message, frozen=True, kw_only=True):
    """What a request asks of sampling. Ranges were checked at the front door.

    `max_tokens` counts the first token, which prefill samples. `script` replaces the choice of
    tokens and exists only with `[testing] scripted = true`.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    n: int = 1
    max_tokens: int = 1
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()  # generation ends with one of these
    logprobs: int | None = None  # None: off; k: the chosen token and the k best
    script: tuple[int, ...] | None = None
    grammar: Grammar | None = None  # masks follow it from the first token on


class ImageRef(Message, frozen=True, kw_only=True):
    """An image by content.

    `digest` is BLAKE2b-128 over its bytes; sizes are after EXIF orientation.
    """

    digest: bytes
    width: int
    height: int
    tokens: int


class EncodeJob(Message, frozen=True, kw_only=True):
    """router → encoder.

    `payloads[i]` is empty until the encoder asked for it with `ImagesMissing`.
    """

    request: str
    images: tuple[ImageRef, ...]
    payloads: tuple[bytes, ...]
    deadline_s: float
    probe: bool = False
    trace: str = ""


class ImagesMissing(Message, frozen=True, kw_only=True):
    """encoder → router: send these images' bytes (indices into the job's images)."""

    indices: tuple[int, ...]


class PrefillJob(Message, frozen=True, kw_only=True):
    """router → prefill. Image rows start at `image_offsets[i]` in `token_ids`."""

    request: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    deadline_s: float
    image_offsets: tuple[int, ...] = ()
    embeds: EmbedTicket | None = None
    embeds_from: Endpoint | None = None
    salt: bytes = b""  # tenant's share of the prefix keys
    canary: bool = False
    probe: bool = False
    trace: str = ""


class Offered(Message, frozen=True, kw_only=True):
    """prefill → router, without a reply: a job's offer, while its last chunk is computed."""

    request: str
    offer: Offer


class PullJob(Message, frozen=True, kw_only=True):
    """router → decode: READ an offer as it becomes final; `DecodeJob` will bring its seal.

    The reply, `Done`, comes when everything was READ. Nothing is used before the seal.
    """

    request: str
    reservation: bytes
    offer: Offer
    producer: Endpoint
    deadline_s: float
    probe: bool = False
    trace: str = ""


class Await(Message, frozen=True, kw_only=True):
    """receiver → owner: this offer is wanted; answer when more than `known` portions are final.

    The reply is `Final`, after a while at the latest, or `Refused` with part `lease`.
    """

    nonce: bytes
    known: int


class Final(Message, frozen=True, kw_only=True):
    """owner → receiver: so many portions of the offer are final, the first ones."""

    portions: int


class Reserve(Message, frozen=True, kw_only=True):
    """router → decode, before prefill starts.

    `num_tokens`: prompt and answer together, one choice.
    """

    request: str
    prompt_tokens: int
    max_tokens: int
    n: int = 1
    canary: bool = False
    probe: bool = False


class Reservation(Message, frozen=True, kw_only=True):
    """decode → router: slots and pages are held for `lease_s`, renewed like any lease."""

    id: bytes
    epoch: int
    lease_s: float


class DecodeJob(Message, frozen=True, kw_only=True):
    """router → decode.

    `forced[c]` are all tokens choice c already emitted, the first included (replay); empty: none.
    Forced tokens go through the step and do not appear in frames again.
    """

    request: str
    reservation: bytes
    ticket: CacheTicket
    producer: Endpoint
    token_ids: tuple[int, ...]
    sampling: Sampling
    deadline_s: float
    forced: tuple[tuple[int, ...], ...] = ()
    probe: bool = False
    trace: str = ""


class Accepted(Message, frozen=True, kw_only=True):
    """decode → router: verified; frames follow. Times of waiting, pulling and verifying."""

    wait_s: float
    pull_s: float
    verify_s: float


class TokenItem(Message, frozen=True, kw_only=True):
    """One choice's share of a frame.

    `finish`: "" while running, else stop, length, cancelled or error; an error has a sentence and
    its code in `common.errors`.
    """

    request: str
    choice: int
    tokens: tuple[TokenOut, ...] = ()
    finish: str = ""
    error: str = ""
    code: str = ""


class TokenFrame(Message, frozen=True, kw_only=True):
    """decode → router, one per step and router: every token of this router's requests."""

    step: int
    items: tuple[TokenItem, ...]


class Renew(Message, frozen=True, kw_only=True):
    """receiver → owner: these tickets or reservations are still wanted."""

    nonces: tuple[bytes, ...]


class Release(Message, frozen=True, kw_only=True):
    """receiver → owner.

    Done with a ticket or reservation. `outcome`: released, refused, expired, aborted.
    """

    nonce: bytes
    outcome: str


class Cancel(Message, frozen=True, kw_only=True):
    """router → room: forget a request wherever it stands."""

    request: str


class Pace(Message, frozen=True, kw_only=True):
    """router → decode: step this request no further for now (its client does not read), or go on.

    It keeps its slots and pages meanwhile.
    """

    request: str
    paused: bool


class Done(Message, frozen=True, kw_only=True):
    """The empty reply."""


class Refused(Message, frozen=True, kw_only=True):
    """The reply that carries an error of `common.errors`: its code, sentence, and part or field."""

    code: str
    message: str
    part: str = ""


AnyMessage = (
    Endpoint
    | Hello
    | EncodeJob
    | ImagesMissing
    | EmbedTicket
    | PrefillJob
    | CacheTicket
    | Offered
    | PullJob
    | Await
    | Final
    | Reserve
    | Reservation
    | DecodeJob
    | Accepted
    | TokenFrame
    | Renew
    | Release
    | Cancel
    | Pace
    | Done
    | Refused
    | Ping
    | Load
    | Inventory
    | Holdings
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage, strict=True)


def pack(message: Message) -> bytes:
    """Encode one message."""
    return _encoder.encode(message)


def unpack(data: bytes | memoryview) -> AnyMessage:
    """Decode one message.

    Raises:
        msgspec.ValidationError: unknown tag, unknown or missing field, wrong type.
    """
    return _decoder.decode(data)
