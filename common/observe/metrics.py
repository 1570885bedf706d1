"""Every metric, declared once, and the counters of one process.

A room keeps one `Tally` and sends its snapshot in `Load.counters`; the router adds the labels
`room` and `replica` and renders what all replicas said as Prometheus text. This module knows the
names and their meaning; it refuses to know who counts and who scrapes.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_COUNTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0, 16384.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric: `kind` is counter, gauge or histogram; `why` is the question it answers."""

    name: str
    kind: str
    unit: str
    stage: str
    why: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram


def _counter(name: str, unit: str, stage: str, why: str, *labels: str) -> Metric:
    return Metric(name=name, kind="counter", unit=unit, stage=stage, why=why, labels=labels)


def _gauge(name: str, unit: str, stage: str, why: str, *labels: str) -> Metric:
    return Metric(name=name, kind="gauge", unit=unit, stage=stage, why=why, labels=labels)


def _seconds(name: str, stage: str, why: str, *labels: str) -> Metric:
    return Metric(
        name=name,
        kind="histogram",
        unit="seconds",
        stage=stage,
        why=why,
        labels=labels,
        buckets=_SECONDS,
    )


def _counts(name: str, unit: str, stage: str, why: str) -> Metric:
    return Metric(
        name=name, kind="histogram", unit=unit, stage=stage, why=why, buckets=_COUNTS
    )  # one observation a step or request


_ALL = (
    # the front door
    _counter(
        "baton_http_responses_total", "responses", "router", "Is the door answering?", "status"
    ),
    _counter(
        "baton_requests_total", "requests", "router", "How do requests end?", "outcome"
    ),  # a finish reason, or the code of an error
    _gauge("baton_requests_running", "requests", "router", "How many are between door and end?"),
    _gauge("baton_admission_queued", "requests", "router", "How many wait for a reservation?"),
    _seconds("baton_admission_wait_seconds", "router", "How long do they wait for it?"),
    _gauge("baton_admission_oldest_seconds", "seconds", "router", "How long does the first wait?"),
    _seconds("baton_first_token_seconds", "router", "What does a reader wait before the answer?"),
    _seconds(
        "baton_first_token_part_seconds", "router", "Where does the first token's time go?", "part"
    ),  # admission, encode, prefill_wait, prefill; the rest is the wire and the router
    _seconds("baton_next_token_seconds", "router", "How fast does the answer come after that?"),
    _seconds("baton_request_seconds", "router", "How long does a request take in all?"),
    _counter("baton_good_requests_total", "requests", "router", "How many met the objective?"),
    _counter("baton_prompt_tokens_total", "tokens", "router", "How much is asked?"),
    _counter("baton_completion_tokens_total", "tokens", "router", "How much is answered?"),
    _counter("baton_prefix_tokens_total", "tokens", "router", "How much came from a cache?"),
    _counter("baton_reprefills_total", "requests", "router", "How often is a hand-off made again?"),
    _counter(
        "baton_replays_total", "requests", "router", "How often does a death cost a replay?", "died"
    ),
    _counter("baton_slow_readers_total", "requests", "router", "Who was dropped for not reading?"),
    _counter("baton_probes_total", "probes", "router", "Do pairs of rooms agree?", "outcome"),
    _gauge("baton_pairs_ready", "pairs", "router", "How many pairs have passed their probe?"),
    _gauge("baton_ready", "boolean", "router", "Would `/ready` say yes?"),
    _gauge("baton_replica_silent", "boolean", "router", "Which replica does not answer?"),
    _gauge("baton_replica_epoch", "epoch", "router", "Which replica restarted?"),
    # what every heartbeat says, written by the router
    _gauge("baton_queued", "jobs", "any", "How many jobs wait in this replica?"),
    _gauge("baton_queued_tokens", "tokens", "any", "How much work is that?"),
    _gauge("baton_running", "jobs", "any", "How many jobs are in its batch?"),
    _gauge("baton_free_slots", "slots", "any", "How many more requests fit?"),
    _gauge("baton_free_pages", "pages", "any", "How many more tokens fit?"),
    _gauge("baton_total_slots", "slots", "any", "Out of how many slots?"),
    _gauge("baton_total_pages", "pages", "any", "Out of how many pages?"),
    _gauge("baton_oldest_seconds", "seconds", "any", "How long has the oldest job waited?"),
    # encoder
    _counter("baton_images_total", "images", "encoder", "How many images were encoded?"),
    _counter("baton_image_hits_total", "images", "encoder", "How many came from the cache?"),
    _seconds("baton_encode_seconds", "encoder", "What does a batch of images cost?"),
    _counts("baton_encode_patches", "patches", "encoder", "How full is a pass of the tower?"),
    _gauge("baton_embeddings_held", "images", "encoder", "How many wait for their reader?"),
    _gauge("baton_embeddings_cached", "images", "encoder", "How many are only kept?"),
    # prefill
    _counter("baton_prefill_tokens_total", "tokens", "prefill", "How much prompt was computed?"),
    _seconds("baton_prefill_wait_seconds", "prefill", "How long does a job wait for a step?"),
    _seconds("baton_prefill_seconds", "prefill", "How long does a prompt take?"),
    _seconds("baton_prefill_step_seconds", "prefill", "How long does one step take?"),
    _counts("baton_prefill_step_tokens", "tokens", "prefill", "How full is a step?"),
    # decode
    _counter("baton_decode_tokens_total", "tokens", "decode", "How much was generated?"),
    _counter("baton_decode_steps_total", "steps", "decode", "How many steps did that take?"),
    _seconds("baton_decode_step_seconds", "decode", "How long does one step take?"),
    _counts("baton_decode_batch", "choices", "decode", "How full is a step?"),
    _seconds("baton_decode_wait_seconds", "decode", "How long does a ticket wait for its READ?"),
    _gauge(
        "baton_expert_skew", "ratio", "decode", "How many times the mean has the busiest expert?"
    ),  # of the worst layer, over ten seconds or until there are rows enough
    _counter("baton_experts_moved_total", "experts", "decode", "How many changed ranks?"),
    _gauge(
        "baton_expert_imbalance",
        "ratio",
        "decode",
        "How many times the mean has the busiest share?",
    ),
    _counter("baton_reservations_refused_total", "requests", "decode", "How often is it full?"),
    # the hand-off
    _seconds("baton_pull_seconds", "transfer", "How long does a READ take?"),
    _seconds("baton_verify_seconds", "transfer", "How long do digests take after a READ?"),
    _counter("baton_pulled_bytes_total", "bytes", "transfer", "How much was moved?"),
    _counter(
        "baton_transfer_errors_total", "transfers", "transfer", "How do READs fail?", "code"
    ),  # the error's code: lost peer, deadline, cancel
    _counter(
        "baton_nixl_errors_total", "errors", "transfer", "What do NIXL and UCX complain of?", "kind"
    ),  # the library's own name of it, RemoteDisconnect and the like
    _counter(
        "baton_handoffs_refused_total", "tickets", "transfer", "What was not as signed?", "part"
    ),  # without the layer
    _counter("baton_tickets_total", "tickets", "transfer", "How do tickets end?", "outcome"),
    _gauge("baton_tickets_held", "tickets", "transfer", "How many are under lease?"),
    _gauge("baton_quarantine", "regions", "transfer", "How many READs outlived their request?"),
    _counter("baton_poisoned_total", "requests", "any", "How often was a value not finite?"),
    _counter("baton_cancelled_total", "requests", "any", "How often did the reader leave?"),
    _gauge("baton_resident_bytes", "bytes", "any", "How much memory does the process hold?"),
    # scaling
    _gauge("baton_replicas", "replicas", "scaling", "How many replicas answer?", "stage"),
    _gauge("baton_scaling_target", "replicas", "scaling", "How many should there be?", "stage"),
    _gauge("baton_scaling_frozen", "boolean", "scaling", "Are its figures missing?", "stage"),
    _counter("baton_scaling_changes_total", "changes", "scaling", "How often?", "stage"),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _ALL}


def sample(name: str, labels: Mapping[str, str]) -> str:
    """One sample's key as Prometheus writes it: `name{label="value"}`."""
    if not labels:
        return name
    body = ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())
    return f"{name}{{{body}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Tally:
    """The counters of one process; its methods may be called from any thread."""

    def __init__(self) -> None:
        """Start with nothing counted."""
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Raise a counter."""
        self._check(name, "counter", labels)
        with self._lock:
            self._raise(sample(name, labels), amount)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Give a gauge its present value."""
        self._check(name, "gauge", labels)
        with self._lock:
            self._values[sample(name, labels)] = value

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add one observation to a histogram."""
        metric = self._check(name, "histogram", labels)
        with self._lock:
            if sample(f"{name}_count", labels) not in self._values:
                for bound in metric.buckets:
                    self._values[sample(f"{name}_bucket", labels | {"le": f"{bound:g}"})] = 0.0
            for bound in metric.buckets[bisect_left(metric.buckets, value) :]:
                self._raise(sample(f"{name}_bucket", labels | {"le": f"{bound:g}"}), 1.0)
            self._raise(sample(f"{name}_bucket", labels | {"le": "+Inf"}), 1.0)
            self._raise(sample(f"{name}_sum", labels), value)
            self._raise(sample(f"{name}_count", labels), 1.0)

    def snapshot(self) -> dict[str, float]:
        """All samples so far by key; histograms as `_bucket`, `_sum` and `_count`."""
        with self._lock:
            return dict(self._values)

    def _raise(self, key: str, amount: float) -> None:
        self._values[key] = self._values.get(key, 0.0) + amount

    def _check(self, name: str, kind: str, labels: Mapping[str, str]) -> Metric:
        metric = METRICS.get(name)
        if metric is None:
            raise ValueError(f"metric `{name}` is not declared; add it to common.observe.metrics")
        if metric.kind != kind or set(metric.labels) != set(labels):
            raise ValueError(
                f"metric `{name}` is a {metric.kind} with labels {list(metric.labels)}, "
                f"used as a {kind} with {sorted(labels)}"
            )
        return metric


def render(sources: Iterable[tuple[Mapping[str, str], Mapping[str, float]]]) -> str:
    """Prometheus text of many snapshots; each comes with the labels of its source."""
    families: dict[str, list[str]] = {}
    for extra, values in sources:
        prefix = sample("", extra)[1:-1]
        for key, value in values.items():
            name, _, rest = key.partition("{")
            inner = ",".join(part for part in (prefix, rest.removesuffix("}")) if part)
            line = f"{name}{{{inner}}} {value:.17g}" if inner else f"{name} {value:.17g}"
            families.setdefault(_family(name), []).append(line)
    text: list[str] = []
    for name in sorted(families):
        metric = METRICS.get(name)
        if metric is not None:
            text.append(f"# HELP {name} {metric.why} Stage: {metric.stage}; in {metric.unit}.")
            text.append(f"# TYPE {name} {metric.kind}")
        text.extend(families[name])
    return "\n".join(text) + "\n"


def _family(name: str) -> str:
    for suffix in ("_bucket", "_sum", "_count"):
        stem = name.removesuffix(suffix)
        if stem != name and stem in METRICS:
            return stem
    return name
