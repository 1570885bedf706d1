"""A collector that takes spans over OTLP, as protobuf over HTTP, and keeps them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tests.support.processes import eventually


@dataclass(frozen=True)
class Seen:
    """One span as it arrived; ids in hex, times in nanoseconds."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    state: str
    start: int
    end: int
    is_error: bool
    attributes: dict[str, str | int | float | bool]
    events: dict[str, dict[str, str | int | float | bool]]


@dataclass
class Collector:
    """Where it listens, and what came."""

    endpoint: str = ""
    spans: list[Seen] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)

    def named(self, name: str) -> list[Seen]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> Seen:
        (span,) = self.named(name)
        return span

    def until(self, name: str, count: int = 1) -> None:
        eventually(lambda: len(self.named(name)) >= count, within_s=20)

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        self.raw.append(body)
        for resource in request.resource_spans:
            service = plain(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [seen(service, span) for span in scope.spans]


def plain(attributes) -> dict[str, str | int | float | bool]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}


def seen(service: str, span) -> Seen:
    return Seen(
        service=service,
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        state=span.trace_state,
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        is_error=span.status.code == Status.STATUS_CODE_ERROR,
        attributes=plain(span.attributes),
        events={event.name: plain(event.attributes) for event in span.events},
    )


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port for as long as the block runs."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            is_ours = self.path == "/v1/traces"
            is_ours &= self.headers["Content-Type"] == "application/x-protobuf"
            self.send_response(200 if is_ours else 400)
            self.end_headers()
            if is_ours:
                collector.take(body)
                self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    collector.endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join(5)
        server.server_close()
