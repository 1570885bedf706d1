"""Tools: what is offered, called, streamed and read back.

Longer than 300 lines because it goes through the ways of calling, one by one.
"""

from __future__ import annotations

import json
from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prompt.tools import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Moved,
    Reasoning,
    ReplyParser,
)
from tests.support.nano import ROOT, nano_tokenizer

TOKENIZER = nano_tokenizer()
MARKERS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")


def parser(*, thinking=True, tools=True):
    numbers = count()
    return ReplyParser(
        TOKENIZER, thinking=thinking, delivers_tools=tools, call_id=lambda: f"id{next(numbers)}"
    )


def fields(events):
    """The reply that a client puts together from events."""
    reply = {"reasoning": "", "content": "", "calls": [], "done": set()}
    for event in events:
        match event:
            case Reasoning(text):
                reply["reasoning"] += text
            case Content(text):
                reply["content"] += text
            case Moved(text):
                assert text == reply["reasoning"]
                reply["reasoning"], reply["content"] = "", text
            case CallStart(index, _, name):
                assert index == len(reply["calls"])
                reply["calls"].append([name, ""])
            case CallArguments(index, text):
                reply["calls"][index][1] += text
            case CallEnd(index):
                reply["done"].add(index)
    return reply


def read(text, **options):
    reader = parser(**options)
    return fields([*reader.feed(TOKENIZER.encode_marked(text)), *reader.finish()])


def tag(name, **attributes):
    inner = "".join(f' {key}="{value}"' for key, value in attributes.items())
    return f"<|open|>{name}{inner}<|sep|>"


def end(name):
    return f"<|close|>{name}<|sep|>"


def argument(key, kind, value):
    return tag("argument", key=key, type=kind) + value + end("argument")


def call(name, *arguments, index=1):
    return tag("call", tool=name, index=index) + "".join(arguments) + end("call")


def tools(*calls):
    return tag("tools") + "".join(calls) + end("tools")


NOTE = 'line one\nline "two" {braces} \\ and 日本 🌊\ttab'
META = '{"a": {"b": [1, {"c": "}"}]}}'
THOUGHT = "x" + end("think") + tag("response")
FULL = (
    THOUGHT
    + "Saving."
    + end("response")
    + tools(
        call(
            "save_note",
            argument("text", "string", NOTE),
            argument("meta", "object", META),
            argument("pin", "boolean", "true"),
        ),
        call("lookup_tide", argument("harbour", "string", "Brest"), index=2),
    )
    + end("message")
    + "<|end_of_msg|>"
)


def test_a_whole_reply_becomes_its_fields():
    reply = read(FULL)
    assert (reply["reasoning"], reply["content"]) == ("x", "Saving.")
    assert [name for name, _ in reply["calls"]] == ["save_note", "lookup_tide"]
    assert json.loads(reply["calls"][0][1]) == {"text": NOTE, "meta": json.loads(META), "pin": True}
    assert json.loads(reply["calls"][1][1]) == {"harbour": "Brest"}
    assert reply["done"] == {0, 1}


@pytest.mark.parametrize("tool_list", [True, False])
@pytest.mark.parametrize("thinking", [True, False])
@given(cuts=st.lists(st.integers(0, 1000), max_size=20), length=st.integers(0, 1000))
def test_every_way_of_cutting_the_stream_gives_the_same_fields(tool_list, thinking, cuts, length):
    ids = TOKENIZER.encode_marked(FULL)[:length]
    whole = parser(thinking=thinking, tools=tool_list)
    expected = fields([*whole.feed(ids), *whole.finish()])
    pieces = parser(thinking=thinking, tools=tool_list)
    edges = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    events = [e for a, b in pairwise(edges) for e in pieces.feed(ids[a:b])]
    assert fields([*events, *pieces.finish()]) == expected
    assert pieces.reasoning_tokens == whole.reasoning_tokens


@given(
    st.lists(
        st.integers(0, 1535)
        | st.sampled_from([TOKENIZER.open, TOKENIZER.close, TOKENIZER.sep, TOKENIZER.end_of_msg])
    )
)
def test_any_ids_are_read_without_failing_and_without_markers(ids):
    reader = parser()
    reply = fields([*reader.feed(ids), *reader.finish()])
    assert len(reply["done"]) == reader.calls
    plain = TOKENIZER.decode(ids, names=False)
    if not any(marker in plain for marker in MARKERS):
        shown = reply["reasoning"] + reply["content"]
        assert not any(marker in shown for marker in MARKERS)


words = st.sampled_from(
    ["think", "response", "tools", "call", "argument", "message", "json", "", "x"]
)
piece = st.one_of(
    words,
    st.builds(tag, words),
    st.builds(end, words),
    st.just(tag("call", tool="t", index=1)),
    st.just(tag("argument", key="k", type="number")),
    st.sampled_from(["1", "🌊", " ", "<|sep|>", "<|open|>", "<|close|>"]),
)


@given(st.lists(piece, max_size=30), st.booleans())
def test_finished_calls_always_hold_a_json_object(pieces, thinking):
    reply = read("".join(pieces), thinking=thinking)
    raw = tag("json") in pieces
    for index in reply["done"]:
        assert raw or isinstance(json.loads(reply["calls"][index][1]), dict)


def test_a_truncated_reply_never_completes_an_argument():
    ids = TOKENIZER.encode_marked(FULL)
    for length in range(len(ids)):
        reader = parser()
        reply = fields([*reader.feed(ids[:length]), *reader.finish()])
        for index, (_, arguments) in enumerate(reply["calls"]):
            if index not in reply["done"]:
                with pytest.raises(ValueError):
                    json.loads(arguments)


@pytest.mark.parametrize(
    ("kind", "value", "written"),
    [
        ("number", "12345678901234567890123", "12345678901234567890123"),
        ("number", "1.50", "1.50"),
        ("number", "-1.5E+300", "-1.5E+300"),
        ("number", "1e400", '"1e400"'),
        ("array", "[0, -1e400]", '"[0, -1e400]"'),
        ("number", "9" * 5000, "9" * 5000),
        ("null", "null", "null"),
        ("array", '[1, "é", {"k": null}]', '[1, "é", {"k": null}]'),
        ("string", "", '""'),
        ("string", "true", '"true"'),
        ("number", "NaN", '"NaN"'),
        ("object", '{"a": ', '"{\\"a\\": "'),
        ("array", "[" * 100_000, json.dumps("[" * 100_000)),
        ("number", "", '""'),
    ],
)
def test_arguments_survive_as_they_were_written(kind, value, written):
    reply = read(THOUGHT + tools(call("f", argument("k", kind, value))))
    assert reply["calls"] == [["f", '{"k": ' + written + "}"]]


@pytest.mark.parametrize("kind", ["number", "string"])
def test_an_argument_given_twice_is_given_out_as_it_came_first(kind):
    said = [argument("a", "number", "1"), argument("a", kind, "2"), argument("b", "number", "3")]
    assert read(THOUGHT + tools(call("f", *said)))["calls"] == [["f", '{"a": 1, "b": 3}']]
    left_open = THOUGHT + tag("tools") + tag("call", tool="f", index=1) + said[0]
    left_open += tag("argument", key="a", type=kind) + "2" + end("tools")
    assert read(left_open)["calls"] == [["f", '{"a": 1}']]


def test_names_and_keys_are_unescaped():
    tagged = argument("key &quot;q&quot; &amp; &amp;quot; more", "string", "v")
    name, arguments = read(THOUGHT + tools(call("a&amp;b", tagged)))["calls"][0]
    assert name == "a&b"
    assert json.loads(arguments) == {'key "q" & &quot; more': "v"}


def test_a_call_without_arguments_holds_an_empty_object():
    assert read(THOUGHT + tools(call("ping")))["calls"] == [["ping", "{}"]]


def test_arguments_given_as_one_json_text_are_passed_on():
    raw = tag("json", type="object") + '{"a": 1}' + end("json")
    assert read(THOUGHT + tools(call("f", raw)))["calls"] == [["f", '{"a": 1}']]


def test_string_arguments_are_let_out_as_they_come():
    reader = parser()
    reader.feed(TOKENIZER.encode_marked(THOUGHT + tag("tools") + tag("call", tool="f", index=1)))
    reader.feed(TOKENIZER.encode_marked(tag("argument", key="t", type="string")))
    assert reader.feed(TOKENIZER.encode("ab")) == [CallArguments(0, "ab")]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("Got it." + end("think") + tag("response") + "High water.", "Got it.", "High water."),
        ("Paris." + end("response") + end("message"), "", "Paris."),
        ("ok" + end("think") + tag("response") + "Hello" + end("message"), "ok", "Hello"),
        ("first I would consider", "first I would consider", ""),
        ("half<|close|>thi", "half", ""),
        (end("think") + tag("response") + "Hi" + end("response") + end("message"), "", "Hi"),
        (tag("response") + "Hi", "", "Hi"),
        ("a" + end("think") + "\n Hi", "a", "Hi"),
        (tag("think") + "a" + end("think") + tag("response") + "b", "a", "b"),
        ("a" + end("think") + tag("response") + "b" + end("response") + " trailing", "a", "b"),
        ("a" + end("message") + "b", "a", ""),
        ("a<|end_of_msg|>b", "a", ""),
        ("a<|sep|>b[BOS]c", "abc", ""),
    ],
)
def test_irregular_replies_keep_their_text_in_its_channel(text, reasoning, content):
    reply = read(text)
    assert (reply["reasoning"], reply["content"]) == (reasoning, content)


def test_without_thinking_the_reply_starts_in_the_response():
    assert read("Hi" + end("response"), thinking=False)["content"] == "Hi"


def test_a_call_straight_from_the_think_channel_is_a_call():
    reply = read("Need it." + tools(call("f")) + end("message"))
    assert (reply["reasoning"], reply["content"], reply["calls"]) == ("Need it.", "", [["f", "{}"]])


def test_calls_are_not_given_out_where_no_tool_was_declared():
    reply = read(FULL, tools=False)
    assert (reply["content"], reply["calls"]) == ("Saving.", [])


def test_text_that_looks_like_a_marker_stays_text():
    reader = parser(thinking=False)
    text = "<|close|>response<|sep|><|open|>tools<|sep|>"
    assert reader.feed(TOKENIZER.encode(text)) == [Content(text)]


def test_reasoning_tokens_are_those_of_the_think_channel():
    reader = parser()
    reader.feed(TOKENIZER.encode_marked("abc" + end("think") + tag("response") + "abc"))
    assert reader.reasoning_tokens == len(TOKENIZER.encode("abc"))


def test_ids_of_calls_differ():
    reader = ReplyParser(TOKENIZER, thinking=True, delivers_tools=True)
    events = reader.feed(TOKENIZER.encode_marked(tools(call("f"), call("f"))))
    assert len({event.id for event in events if isinstance(event, CallStart)}) == 2


def test_a_character_cut_off_at_a_marker_is_replaced_once():
    reader = parser(thinking=False)
    wave = TOKENIZER.encode("🌊")
    events = reader.feed([*wave[:-1], TOKENIZER.close])
    assert fields(events)["content"] == "\ufffd"


def test_the_scripted_cases_are_read_in_every_cut():
    lines = (ROOT / "tests/data/http_cases.jsonl").read_text().splitlines()
    scripts = [
        json.loads(line)["setup"]["scripted_output"]
        for line in lines
        if '"scripted_output"' in line
    ]
    assert len(scripts) > 15
    for script in scripts:
        ids = TOKENIZER.encode_marked(script.replace("{{repeat:z:20000}}", "z" * 20000))
        whole, single = parser(), parser()
        expected = fields([*whole.feed(ids), *whole.finish()])
        events = [event for token in ids for event in single.feed([token])]
        assert fields([*events, *single.finish()]) == expected
        shown = json.dumps(expected["calls"]) + expected["reasoning"] + expected["content"]
        assert not any(marker in shown for marker in MARKERS)


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ("", {}),
        (tag("argument", key="a", type="string") + "x", {"a": "x"}),
        (tag("argument", key="a", type="number") + "12", {"a": 12}),
    ],
    ids=["before any argument", "in a string", "in a number"],
)
@pytest.mark.parametrize("after", ["tools", "message", "another call", "the end"])
def test_a_call_that_the_model_left_open_still_holds_a_json_object(inside, arguments, after):
    ends = {
        "tools": "<|close|>tools<|sep|>",
        "message": "<|close|>message<|sep|>",
        "another call": tag("call", tool="g", index="2") + "<|close|>call<|sep|>",
        "the end": "<|end_of_msg|>",
    }
    reply = read(tag("tools") + tag("call", tool="f", index="1") + inside + ends[after])
    name, text = reply["calls"][0]
    assert (name, json.loads(text)) == ("f", arguments)
    assert 0 in reply["done"]
