"""Every knob on one page: one frozen dataclass per TOML table, checked once.

Durations end in `_s`, sizes in `_bytes`. Defaults serve the bundled nano checkpoint on a laptop;
`deploy/settings/local.toml` shows them in use. Longer than 300 lines because it is one page.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.config.scaling import ScalingSettings
from common.errors import ConfigError

LEAST_LEASE_S = 15.0  # `common/contract/protocol.py` posts a READ with 10 s left or not at all
LOOPBACK = {"127.0.0.1", "::1", "localhost"}


def _positive(table: str, values: dict[str, float]) -> None:
    for key, value in values.items():
        if value <= 0:
            raise ConfigError(f"{table}.{key} is {value}; it must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The [model] table."""

    path: str = "checkpoints/nano"
    name: str = "nano-k3"  # the id clients send as `model`
    dtype: str = "float32"  # of weights, latents and activations: float32 or bfloat16
    device: str = "cpu"
    ops: str = "auto"  # bodies of the ops: auto, reference (torch), triton (refuses to mix) or fp8
    exact: bool = False  # on a GPU: fixed tiles, so that no neighbour changes a bit; CPUs have them
    context: int = 0  # most tokens of prompt and answer; 0: what the checkpoint says

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"model.dtype is {self.dtype!r}; use float32 or bfloat16")
        if self.ops not in ("auto", "reference", "triton", "fp8"):
            raise ConfigError(f"model.ops is {self.ops!r}; use auto, reference, triton or fp8")
        if not self.name or any(c.isspace() for c in self.name):
            raise ConfigError(f"model.name is {self.name!r}; give an id without spaces")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The [server] table: the two listeners."""

    host: str = "127.0.0.1"
    port: int = 8000
    admin_host: str = "127.0.0.1"
    admin_port: int = 8001
    room_host: str = "127.0.0.1"  # where rooms listen for routers; "": the address of their node
    body_limit_bytes: int = 64 << 20
    header_limit_bytes: int = 32 << 10
    read_s: float = 20.0  # for a request's head; for a body, beside a second for each 64 KiB
    request_timeout_s: float = 600.0
    keep_alive_s: float = 15.0  # silence after which a stream gets a comment line
    drain_s: float = 30.0
    cors_origins: tuple[str, ...] = ()  # whose pages may ask from a browser; "*": everyone's

    def __post_init__(self) -> None:
        _positive("server", {"body_limit_bytes": self.body_limit_bytes, "read_s": self.read_s})
        for key, port in (("port", self.port), ("admin_port", self.admin_port)):
            if not 0 <= port <= 65535:
                raise ConfigError(f"server.{key} is {port}; a port is between 0 and 65535")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    """The [access] table: API keys. Without keys everyone may ask."""

    keys: tuple[str, ...] = ()  # "name:hash", the hash being SHA-256 of the key in hex
    requests_per_minute: int = 0  # of one key; 0: no limit
    concurrent: int = 0  # requests of one key at once; 0: no limit
    admin: str = ""  # hash of the second listener's key; without one it must stay on loopback

    def __post_init__(self) -> None:
        for entry in self.keys:
            name, _, digest = entry.partition(":")
            if not name or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
                raise ConfigError(
                    f"access.keys holds {name!r}, which is not `name:hash`; the hash is what "
                    "`printf %s KEY | sha256sum` prints"
                )
        if self.admin and (len(self.admin) != 64 or set(self.admin) - set("0123456789abcdef")):
            raise ConfigError("access.admin is not what `printf %s KEY | sha256sum` prints")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """The [images] table: what the router accepts."""

    max_count: int = 32
    max_bytes: int = 20 << 20
    max_pixels: int = 64_000_000
    allowed_hosts: tuple[str, ...] = ()  # may be private or loopback; others must be public
    allow_http: bool = True
    max_redirects: int = 3
    timeout_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """The [router] table."""

    replicas: int = 1
    queue_limit: int = 256  # requests that wait for a reservation; one more gets 429
    queue_wait_s: float = 60.0  # a longer wait gets 429
    priority_s: float = 1.0  # of waiting, that a step of `priority` is worth; 0: no priorities
    default_max_tokens: int = 4096  # when the request names none; the context may allow less
    max_choices: int = 8
    reprefills: int = 1  # times a refused hand-off is prefilled again
    replays: int = 2  # times a request is continued after a replica died
    heartbeat_s: float = 1.0
    silent_s: float = 5.0  # a replica that has not answered for this long is silent
    probe_s: float = 10.0  # between two probes of a pair
    canary_share: float = 0.0  # of requests whose last prompt token is computed twice


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSettings:
    """The [grammar] table: answers in a given form. Compiled in a process of the router's."""

    source_bytes: int = 1 << 20  # of the grammar of a whole reply, tools included
    compile_s: float = 2.0
    memory_bytes: int = 1 << 30  # of the compiling process, beyond what the vocabulary takes
    cache_bytes: int = 64 << 20  # of compiled grammars, in every room and router

    def __post_init__(self) -> None:
        _positive("grammar", {"source_bytes": self.source_bytes, "compile_s": self.compile_s})


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSettings:
    """The [encoder] table."""

    replicas: int = 1
    arena_rows: int = 8192  # embedding rows kept for readers and as a cache
    batch_patches: int = 16384  # most patches of one tower pass
    queue_limit: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSettings:
    """The [prefill] table."""

    replicas: int = 1
    slots: int = 32
    pages: int = 1024
    step_tokens: int = 1024  # most prompt tokens of one step; less than one chunk means one chunk
    max_batch: int = 16  # most requests of one step
    landing_rows: int = 8192  # embedding rows of admitted prompts
    queue_limit: int = 256
    # Of a replica of several ranks (docs/ranks.md); slots and pages are then a lane's.
    tensor: int = 1
    data: int = 1
    expert: int = 1
    spread: bool = False

    def __post_init__(self) -> None:
        _positive(
            "prefill",
            {"slots": self.slots, "pages": self.pages, "step_tokens": self.step_tokens},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSettings:
    """The [decode] table."""

    replicas: int = 1
    slots: int = 32
    pages: int = 4096
    max_batch: int = 32  # most choices of one step
    graphs: bool = True  # on a GPU: replay steps as CUDA graphs, captured at start
    # Of a replica of several ranks (docs/ranks.md); slots and pages are then a lane's.
    tensor: int = 1  # ranks of a lane that cut heads, vocabulary and widths
    data: int = 1  # lanes of such ranks, each with requests of its own
    expert: int = 1  # shares of whole experts; tensor x data spreads them over all ranks
    spread: bool = False  # between mixers a tensor rank keeps its own rows; expert = tensor x data
    spare_experts: int = 0  # places of every share for copies of popular experts
    exchange: str = "all_to_all"  # between ranks: or direct (one host), nixl_ep (CUDA)
    rebalance_s: float = 0.0  # between two looks at the experts' load; 0: none moves

    def __post_init__(self) -> None:
        _positive("decode", {"slots": self.slots, "pages": self.pages, "max_batch": self.max_batch})
        if (self.spare_experts or self.rebalance_s) and self.expert == 1:
            raise ConfigError(
                "decode.spare_experts and rebalance_s need experts on several shares; set "
                "decode.expert above 1, or leave them out"
            )
        is_summing = self.exchange == "direct" and self.tensor > 1
        if self.exchange != "all_to_all" and self.expert == 1 and not is_summing:
            raise ConfigError(
                f"decode.exchange is {self.exchange!r}, and no ranks exchange anything; set "
                "decode.expert above 1 (or decode.tensor for direct), or leave it out"
            )
        if self.spare_experts and not self.rebalance_s:
            raise ConfigError(
                f"decode.spare_experts is {self.spare_experts} and nothing would use them; set "
                "decode.rebalance_s, for example to 60"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSettings:
    """The [transfer] table."""

    lease_s: float = 30.0
    renew_s: float = 5.0
    deadline_s: float = 10.0  # for one fetch
    quarantine_bound: int = 16  # destinations in quarantine at which a rank must restart
    threads: int = 2
    transports: str = ""  # UCX_TLS, empty: chosen by UCX
    canary_bound: float = 2e-3  # largest difference of the canary's top logits, fp32
    layer_groups: int = 0  # pulled while prefill computes the last chunk; 0: whole tickets alone

    def __post_init__(self) -> None:
        if not self.renew_s < self.lease_s / 2:
            raise ConfigError(
                f"transfer.renew_s is {self.renew_s:g} and lease_s {self.lease_s:g}; "
                "a lease must outlive two renewals"
            )
        if self.lease_s < LEAST_LEASE_S:
            raise ConfigError(
                f"transfer.lease_s is {self.lease_s:g}; a READ is posted only with 10 s left of a "
                f"lease, so make it {LEAST_LEASE_S:g} or more"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSettings:
    """The [objective] table: what a good answer is; goodput and scaling are measured by it."""

    first_token_s: float = 2.0
    next_token_s: float = 0.2  # mean of a request

    def __post_init__(self) -> None:
        _positive(
            "objective", {"first_token_s": self.first_token_s, "next_token_s": self.next_token_s}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSettings:
    """The [trace] table: spans over OTLP, for which the extra `baton[trace]` is needed."""

    endpoint: str = ""  # the collector's URL, http://host:4318/v1/traces; empty: no spans are made
    share: float = 1.0  # of requests without a `traceparent`; one that has it decides itself

    def __post_init__(self) -> None:
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"trace.endpoint is {self.endpoint!r}; give a collector's URL, "
                "like http://127.0.0.1:4318/v1/traces"
            )
        if not 0 <= self.share <= 1:
            raise ConfigError(f"trace.share is {self.share:g}; a share is between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class TestingSettings:
    """The [testing] table: hooks that refuse any bind but loopback."""

    scripted: bool = False  # requests may bring the tokens to emit
    verify: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The whole deployment file."""

    model: ModelSettings = field(default_factory=ModelSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    access: AccessSettings = field(default_factory=AccessSettings)
    images: ImageSettings = field(default_factory=ImageSettings)
    router: RouterSettings = field(default_factory=RouterSettings)
    grammar: GrammarSettings = field(default_factory=GrammarSettings)
    encoder: EncoderSettings = field(default_factory=EncoderSettings)
    prefill: PrefillSettings = field(default_factory=PrefillSettings)
    decode: DecodeSettings = field(default_factory=DecodeSettings)
    transfer: TransferSettings = field(default_factory=TransferSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    scaling: ScalingSettings = field(default_factory=ScalingSettings)
    trace: TraceSettings = field(default_factory=TraceSettings)
    testing: TestingSettings = field(default_factory=TestingSettings)

    def __post_init__(self) -> None:
        if self.server.admin_host not in LOOPBACK and not self.access.admin:
            raise ConfigError(
                f"server.admin_host is {self.server.admin_host!r} and access.admin is empty; give "
                "the hash of a key, as `printf %s KEY | sha256sum` prints it, or bind loopback"
            )
        hooks = self.testing.scripted or not self.testing.verify
        bound = {self.server.host, self.server.admin_host}
        if hooks and not bound <= LOOPBACK:
            raise ConfigError(
                f"[testing] hooks are on while the server binds {sorted(bound)}; "
                "bind loopback or remove the [testing] table"
            )
