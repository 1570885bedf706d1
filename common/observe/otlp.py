"""Spans to a collector over OTLP, in the background; the one place that speaks OpenTelemetry.

The packages are in the extra `baton[trace]`, and are loaded when a router is told a collector's
address. A span's times may lie in the past: the router makes the spans of every stage when a
request ends, from the times that the rooms told. Attributes are names, counts and short words.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext, Tracer

EXPORT_S = 5.0  # patience of one export
Value = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """An event within a span, at so many seconds of Unix time."""

    name: str
    at: float
    attributes: Mapping[str, Value]


class Spans:
    """Makes spans and sends them; one of a process. Methods are called on the event loop."""

    def __init__(self, endpoint: str, share: float, *, instance: str) -> None:
        """`share` of the traces that begin here are kept; others follow their `traceparent`.

        Raises:
            ConfigError: the packages are not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace import sampling
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"trace.endpoint is set and {error.name} is missing; install baton[trace], "
                "or leave the endpoint empty"
            ) from error
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S)
        self._out = BatchSpanProcessor(exporter)
        self._sampler = sampling.ParentBased(sampling.TraceIdRatioBased(share))
        self._instance = instance
        self._tracers: dict[str, Tracer] = {}

    def begin(self, name: str, trace: str, state: str, attributes: Mapping[str, Value]) -> Span:
        """Open the span of a call that came in, below the client's `trace` where there is one."""
        from opentelemetry.trace import SpanKind

        parent = _parsed(trace, state) if trace else None
        return self._tracer("router").start_span(
            name, _below(parent), kind=SpanKind.SERVER, attributes=attributes
        )

    def add(
        self,
        service: str,
        name: str,
        parent: str | SpanContext,
        *,
        began: float,
        long_s: float,
        attributes: Mapping[str, Value],
        error: str = "",
        moments: Sequence[Moment] = (),
    ) -> SpanContext:
        """Make a span that is over: `began` is Unix time. Its context is the parent of others.

        `error` is the code of what it ended with; empty: nothing went wrong.
        """
        above = _parsed(parent) if isinstance(parent, str) else parent
        span = self._tracer(service).start_span(
            name, _below(above), attributes=attributes, start_time=_ns(began)
        )
        for moment in moments:
            span.add_event(moment.name, moment.attributes, _ns(moment.at))
        if error:
            fail(span, error)
        span.end(_ns(began + long_s))
        return span.get_span_context()

    def close(self) -> None:
        """Send what is left; blocks for as long as an export may take, and no longer."""
        last = threading.Thread(target=self._out.shutdown, daemon=True)
        last.start()
        last.join(EXPORT_S)

    def _tracer(self, service: str) -> Tracer:
        """Spans of a stage carry its name, `baton-decode` and the like, as their service."""
        if service not in self._tracers:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider

            who = {"service.name": f"baton-{service}", "service.namespace": "baton"}
            if service == "router":
                who["service.instance.id"] = self._instance
            provider = TracerProvider(
                sampler=self._sampler, resource=Resource.create(who), shutdown_on_exit=False
            )
            provider.add_span_processor(self._out)
            self._tracers[service] = provider.get_tracer("baton")
        return self._tracers[service]


def traceparent(span: Span) -> str:
    """A span's place in its trace, as W3C writes it."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def fail(span: Span, code: str) -> None:
    """Mark a span as failed by an error of this code."""
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", code)
    span.set_status(Status(StatusCode.ERROR, code))


def _parsed(trace: str, state: str = "") -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags, TraceState

    return SpanContext(
        trace_id=int(trace[3:35], 16),
        span_id=int(trace[36:52], 16),
        is_remote=True,
        trace_flags=TraceFlags(int(trace[53:], 16)),
        trace_state=TraceState.from_header([state]) if state else None,
    )


def _below(parent: SpanContext | None) -> Any:
    """OpenTelemetry's context that has this parent, and no other."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, set_span_in_context

    empty = Context()
    return set_span_in_context(NonRecordingSpan(parent), empty) if parent else empty


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
