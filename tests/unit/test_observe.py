"""Counters and log lines."""

from __future__ import annotations

import json
import logging
import sys

import pytest
from prometheus_client import parser

from common.observe.logs import JsonLines, note, request_id
from common.observe.metrics import METRICS, Tally, render


def test_a_counter_adds_up_per_set_of_labels():
    tally = Tally()
    tally.add("baton_requests_total", outcome="stop")
    tally.add("baton_requests_total", 2, outcome="stop")
    tally.add("baton_requests_total", outcome="length")
    assert tally.snapshot() == {
        'baton_requests_total{outcome="stop"}': 3.0,
        'baton_requests_total{outcome="length"}': 1.0,
    }


def test_a_gauge_keeps_its_last_value():
    tally = Tally()
    tally.set("baton_pairs_ready", 4)
    tally.set("baton_pairs_ready", 1)
    assert tally.snapshot() == {"baton_pairs_ready": 1}


def test_a_histogram_counts_into_every_bucket_that_holds_the_value():
    tally = Tally()
    for value in (0.001, 0.3, 99.0):
        tally.observe("baton_pull_seconds", value)
    got = tally.snapshot()
    assert got['baton_pull_seconds_bucket{le="0.001"}'] == 1
    assert got['baton_pull_seconds_bucket{le="0.25"}'] == 1
    assert got['baton_pull_seconds_bucket{le="0.5"}'] == 2
    assert got['baton_pull_seconds_bucket{le="30"}'] == 2
    assert got['baton_pull_seconds_bucket{le="+Inf"}'] == 3
    assert got["baton_pull_seconds_count"] == 3
    assert got["baton_pull_seconds_sum"] == pytest.approx(99.301)


@pytest.mark.parametrize(
    ("method", "name", "labels"),
    [
        ("add", "baton_nothing_total", {}),
        ("set", "baton_requests_total", {"outcome": "stop"}),
        ("add", "baton_requests_total", {}),
        ("add", "baton_requests_total", {"outcome": "stop", "user": "x"}),
    ],
)
def test_a_name_or_label_that_was_not_declared_is_refused(method, name, labels):
    with pytest.raises(ValueError, match=name):
        getattr(Tally(), method)(name, 1.0, **labels)


def test_rendering_adds_the_replica_and_declares_each_family_once():
    one, two = Tally(), Tally()
    one.add("baton_decode_tokens_total", 5)
    two.add("baton_decode_tokens_total", 7)
    one.observe("baton_pull_seconds", 0.2)
    text = render(
        [
            ({"room": "decode", "replica": "a"}, one.snapshot()),
            ({"room": "decode", "replica": "b"}, two.snapshot()),
        ]
    )
    lines = text.splitlines()
    assert 'baton_decode_tokens_total{room="decode",replica="a"} 5' in lines
    assert 'baton_decode_tokens_total{room="decode",replica="b"} 7' in lines
    assert 'baton_pull_seconds_bucket{room="decode",replica="a",le="0.25"} 1' in lines
    assert lines.count("# TYPE baton_decode_tokens_total counter") == 1
    assert lines.count("# TYPE baton_pull_seconds histogram") == 1


def test_prometheus_own_parser_reads_what_is_rendered():
    tally = Tally()
    tally.add("baton_requests_total", outcome='odd "value"\\')
    tally.observe("baton_request_seconds", 1.5)
    families = parser.text_string_to_metric_families(
        render([({"room": "router"}, tally.snapshot())])
    )
    samples = {s.name: s for family in families for s in family.samples}
    assert samples["baton_requests_total"].labels["outcome"] == 'odd "value"\\'
    assert samples["baton_request_seconds_sum"].value == 1.5


def test_every_name_tells_its_kind_and_unit():
    for metric in METRICS.values():
        assert metric.name.startswith("baton_")
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.why.endswith("?"), metric.name


def test_a_log_line_is_json_with_the_request_and_its_fields():
    token = request_id.set("req-1")
    try:
        lines: list[str] = []
        logger = logging.getLogger("test-logs")
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(JsonLines("router", "r1").format(record))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        note(logger, logging.INFO, "request ended", outcome="stop", tokens=3, word="x" * 500)
        note(logger, logging.DEBUG, "not written")
    finally:
        request_id.reset(token)
        logger.removeHandler(handler)
    (line,) = [json.loads(text) for text in lines]
    assert line["event"] == "request ended"
    assert (line["room"], line["replica"], line["request"]) == ("router", "r1", "req-1")
    assert (line["outcome"], line["tokens"], len(line["word"])) == ("stop", 3, 200)


@pytest.mark.parametrize("room", ["router", "decode"])
def test_the_router_leaves_out_what_an_exception_says(room):
    try:
        try:
            raise KeyError("a prompt's words")
        except KeyError as first:
            raise ValueError("a prompt's words again") from first
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "a fault", (), sys.exc_info())
    line = json.loads(JsonLines(room).format(record))
    assert "ValueError" in line["exception"] and "KeyError" in line["exception"]
    assert "test_observe.py" in line["exception"]
    told = [row for row in line["exception"].splitlines() if row.startswith(("Key", "Value"))]
    assert any("words" in row for row in told) == (room != "router")
