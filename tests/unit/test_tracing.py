"""A client's trace context, and that spans cost nothing until they are asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from common.config.settings import TraceSettings
from common.errors import ConfigError
from router.tracing import is_kept, read_trace, trace_of
from tests.support.processes import ROOT

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def read(*said: str, state: str | None = None) -> tuple[str, str]:
    headers = [(b"traceparent", value.encode()) for value in said]
    headers += [(b"tracestate", state.encode())] if state is not None else []
    return read_trace(headers)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01"),
        (f"00-{TRACE}-{SPAN}-00", f"00-{TRACE}-{SPAN}-00"),
        (f"  00-{TRACE}-{SPAN}-01 ", f"00-{TRACE}-{SPAN}-01"),
        (f"00-{TRACE}-{SPAN}-ff", f"00-{TRACE}-{SPAN}-03"),  # flags that nobody knows yet
        (f"cc-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01"),  # a version of the future
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-brings", f"00-{TRACE}-{SPAN}-01"),
    ],
)
def test_a_well_formed_context_is_read(said, told):
    assert read(said) == (told, "")
    assert trace_of(told) == TRACE


@pytest.mark.parametrize(
    "said",
    [
        "",
        "anything else",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01-",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}",
        f"cc-{TRACE}-{SPAN}-01more",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}g-{SPAN}-01",
    ],
)
def test_a_malformed_context_is_as_if_it_were_not_there(said):
    assert read(said, state="vendor=1") == ("", "")


def test_two_contexts_are_none():
    assert read(f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01") == ("", "")


def test_the_state_comes_with_its_context_within_limits():
    whole = f"00-{TRACE}-{SPAN}-01"
    assert read(whole, state="a=1,b=2") == (whole, "a=1,b=2")
    assert read(whole, state="a=" + "1" * 600) == (whole, "")


def test_a_trace_is_kept_when_its_flag_says_so():
    assert [is_kept(f"00-{TRACE}-{SPAN}-{flags}") for flags in ("00", "01", "02", "03")] == [
        False,
        True,
        False,
        True,
    ]
    assert not is_kept("")


def test_without_an_endpoint_nothing_of_opentelemetry_is_loaded():
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, router.app; print([n for n in sys.modules if 'opentelemetry' in n])",
        ],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == "[]\n"


@pytest.mark.parametrize(
    ("table", "word"), [({"endpoint": "collector:4317"}, "4318"), ({"share": 1.5}, "between 0")]
)
def test_a_setting_that_cannot_be_is_refused(table, word):
    with pytest.raises(ConfigError, match=word):
        TraceSettings(**table)


def test_an_endpoint_without_the_packages_says_what_to_install(monkeypatch):
    from common.observe.otlp import Spans

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"baton\[trace\]"):
        Spans("http://127.0.0.1:1/v1/traces", 1.0, instance="r1")


def test_a_collector_that_is_gone_delays_no_farewell(monkeypatch):
    from common.observe import otlp

    monkeypatch.setattr(otlp, "EXPORT_S", 0.3)
    spans = otlp.Spans("http://127.0.0.1:1/v1/traces", 1.0, instance="r1")
    spans.add("router", "journey", f"00-{TRACE}-{SPAN}-01", began=1.0, long_s=1.0, attributes={})
    spans.close()  # returns, and raises nothing
