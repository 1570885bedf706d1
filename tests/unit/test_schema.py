"""What a body may say, field by field.

Longer than 300 lines because it goes through the fields, one by one.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest

from common.errors import ContextLengthExceeded, InvalidRequest, NotFound
from router.faults import describe
from router.schema import (
    AssistantMessage,
    RequestLimits,
    ToolResult,
    fit_sampling,
    ignored_header,
    image_sources,
    parse_chat,
)

LIMITS = RequestLimits(models=frozenset({"nano"}), vocab=1536, context=8192, eos=1282)
HI = [{"role": "user", "content": "hi"}]
TIDE = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}


def parse(limits=LIMITS, **fields):
    body = {"model": "nano", "messages": HI} | fields
    return parse_chat(json.dumps(body).encode(), limits)


def refusal(raw: bytes | None = None, **fields) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(raw, LIMITS) if raw is not None else parse(**fields)
    return caught.value


def test_a_plain_request_gets_the_models_defaults():
    request = parse()
    assert (request.thinking, request.effort, request.tool_choice) == (True, "max", "auto")
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.n) == (
        1.0,
        1.0,
        1,
    )
    assert request.sampling.stop_ids == (1282,)
    assert request.max_tokens is None and not request.stream and request.ignored == ()


def test_null_means_unset():
    names = "max_tokens temperature top_p stop n seed stream_options tools tool_choice logit_bias"
    request = parse(**dict.fromkeys(names.split()))
    assert request.sampling.n == 1 and request.stop == () and not request.include_usage


def test_a_missing_seed_differs_from_request_to_request():
    assert parse().sampling.seed != parse().sampling.seed
    assert parse(seed=7).sampling.seed == 7
    seeds = (-1, 2**63 - 1, -(2**63), 0)
    assert [parse(seed=seed).sampling.seed for seed in seeds] == list(seeds)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("temperature", -0.1, "from 0 to 2"),
        ("temperature", 2.5, "from 0 to 2"),
        ("temperature", "NaN", "a number from 0 to 2"),
        ("top_p", 1.5, "from 0 to 1"),
        ("top_k", -7, "an integer from -1"),
        ("n", -1, "from 1"),
        ("n", 0, "`n` is 0; it must be an integer from 1 to 16"),
        ("n", 17, "`n` is 17; it must be an integer from 1 to 16"),
        ("n", 500, "`n` is 500; it must be an integer from 1 to 16"),
        ("n", 1.5, "an integer"),
        ("max_tokens", -5, "from 1"),
        ("max_tokens", 0, "from 1"),
        ("presence_penalty", 3, "from -2 to 2"),
        ("frequency_penalty", 9, "from -2 to 2"),
        ("repetition_penalty", 0, "above 0"),
        ("min_p", 2, "from 0 to 1"),
        ("top_logprobs", 21, "from 0 to 20"),
        ("best_of", 4, "not offered"),
        ("stop", [""], "0 characters"),
        ("logit_bias", {"1536": 5}, "0 to 1535"),
        ("logit_bias", {"-1": 5}, "0 to 1535"),
        ("logit_bias", {"05": 5}, "0 to 1535"),
        ("logit_bias", {"5": "1"}, "holds a wrong value; it must be a number"),
        ("guided_json", {"type": "object"}, "use `structured_outputs`"),
        ("guided_choice", ["a", "b"], "use `structured_outputs`"),
        ("prompt_logprobs", 1, "not computed"),
        ("structured_outputs", {"lark": "x"}, "unknown field, `lark`"),
        ("logit_bias", {"5": 1000}, "100"),
        ("stop_token_ids", [1536], "0 to 1535"),
        ("reasoning_effort", "huge", "none, low, high or max"),
        ("tool_choice", "required", "`tools` is empty"),
        ("functions", [{"name": "f"}], "use `tools`"),
        ("stream_options", {"include_usage": True}, "stream: true"),
        ("messages", 123, "array"),
        ("messages", [], "length >= 1"),
        ("tools", 5, "array"),
    ],
)
def test_a_wrong_value_is_refused_naming_the_field_and_what_is_allowed(field, value, said):
    error = refusal(**{field: value})
    assert error.param == field
    assert said in str(error)


def test_a_least_length_above_either_limit_is_refused():
    for limit in ("max_tokens", "max_completion_tokens"):
        error = refusal(**{"min_tokens": 30, limit: 4})
        assert error.param == "min_tokens" and "4 tokens" in str(error)
    assert parse(min_tokens=4, max_completion_tokens=4).sampling.min_tokens == 4


@pytest.mark.parametrize("value", ["no", 0, [False]])
def test_a_switch_of_thinking_must_be_a_boolean(value):
    for name in ("thinking", "enable_thinking"):
        error = refusal(chat_template_kwargs={name: value})
        assert error.param == f"chat_template_kwargs.{name}" and "boolean" in str(error)
    told = parse(chat_template_kwargs={"thinking": False, "style": "x"})
    assert (told.thinking, told.ignored) == (False, ("chat_template_kwargs.style",))


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (7, "messages[0]"),
        ({"role": "narrator", "content": "hm"}, "messages[0].role"),
        ({"role": 7}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "video"}]}, "messages[0].content[0].type"),
        ({"role": "assistant", "tool_calls": 3}, "messages[0].tool_calls"),
        ({"role": "tool", "tool_call_id": "x", "content": "y"}, "messages[0].tool_call_id"),
        ({"role": "assistant", "content": "x"}, "messages"),
    ],
)
def test_a_wrong_message_is_refused_naming_its_place(message, param):
    assert refusal(messages=[message]).param == param


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "empty"),
        (b"[]", "an array"),
        (b"null", "null"),
        (b"123", "a number"),
        (b'"text"', "a string"),
        (b'{"model":"nano",', "not JSON"),
        (b'{"temperature":NaN}', "byte 15"),
        (b'{"temperature":-Infinity}', "byte"),
        (b'{"temperature":1e400}', "out of range"),
        (b'{"messages":[{"role":"user","content":"a\\ud800b"}]}', "surrogate pair at byte 40"),
        (b'{"messages":[{"role":"user","content":"a\\udc00b"}]}', "surrogate pair at byte 40"),
        (b'{"a":' + b"[" * 100_000, "nested too deeply"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_a_body_that_is_not_a_json_object_is_refused(raw, said):
    assert said in str(refusal(raw))


def test_a_whole_surrogate_pair_is_one_character():
    raw = b'{"model":"nano","messages":[{"role":"user","content":"\\ud83c\\udf0a"}]}'
    assert parse_chat(raw, LIMITS).messages[0].content == "🌊"


def test_thousands_of_faults_make_a_short_reply():
    error = refusal(messages=[{"role": 7}] * 5000)
    assert len(json.dumps(describe(error).body)) < 1000


def test_a_long_value_is_not_echoed():
    assert len(str(refusal(temperature="x" * 10_000))) < 300


def test_an_unknown_model_is_not_found():
    with pytest.raises(NotFound) as caught:
        parse(model="no-such-model")
    fault = describe(caught.value)
    assert (fault.status, fault.error["code"], fault.error["param"]) == (
        404,
        "model_not_found",
        "model",
    )


def test_unknown_fields_are_ignored_and_named():
    request = parse(no_such_field={"a": [1]}, user="me", other=1)
    assert request.ignored == ("no_such_field", "other", "user")
    assert ignored_header(("good", "bad\r\nheader: x", "ü")) == "good, and 2 more"


def test_the_smaller_of_two_limits_counts():
    assert parse(max_tokens=3, max_completion_tokens=5).max_tokens == 3
    assert parse(max_completion_tokens=5).max_tokens == 5


def test_the_answer_is_lowered_to_what_the_context_leaves():
    request = parse(max_tokens=1000, min_tokens=900)
    assert fit_sampling(request, 8172, LIMITS).max_tokens == 20
    assert fit_sampling(request, 8172, LIMITS).min_tokens == 20
    assert fit_sampling(request, 8191, LIMITS).max_tokens == 1
    with pytest.raises(ContextLengthExceeded, match=r"8192 tokens.*8192 tokens"):
        fit_sampling(request, 8192, LIMITS)


def test_an_empty_share_keeps_the_best_token():
    assert parse(top_p=0).sampling.top_k == 1


@pytest.mark.parametrize(
    ("fields", "thinking", "effort"),
    [
        ({"reasoning_effort": "none"}, False, "max"),
        ({"reasoning_effort": "low"}, True, "low"),
        ({"reasoning_effort": "medium"}, True, "high"),
        ({"thinking": {"type": "disabled"}}, False, "max"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, "max"),
        ({"chat_template_kwargs": {"thinking": False}, "reasoning_effort": "low"}, False, "low"),
    ],
)
def test_thinking_is_switched_by_the_names_clients_use(fields, thinking, effort):
    request = parse(**fields)
    assert (request.thinking, request.effort) == (thinking, effort)


def test_tool_choice_must_name_a_declared_tool():
    named = {"type": "function", "function": {"name": "no_such_tool"}}
    assert refusal(tools=[TIDE], tool_choice=named).param == "tool_choice"
    named["function"]["name"] = "tide"
    request = parse(tools=[TIDE], tool_choice=named)
    assert (request.tool_choice, request.named_tool) == ("required", "tide")


def test_tools_keep_the_form_they_were_sent_in():
    tool = {"function": {"extra": 1, "name": "ping"}, "type": "function"}
    assert parse(tools=[tool]).tools == (tool,)


def test_calls_are_delivered_only_when_tools_are_declared_and_allowed():
    assert not parse().delivers_tools
    assert parse(tools=[TIDE]).delivers_tools
    assert not parse(tools=[TIDE], tool_choice="none").delivers_tools
    assert parse(messages=[{"role": "system", "tools": [TIDE]}, *HI]).delivers_tools


def call(id_: str, arguments: str = "{}") -> dict:
    return {"id": id_, "type": "function", "function": {"name": "tide", "arguments": arguments}}


def test_tool_results_come_in_the_order_of_their_calls():
    conversation = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call("x"), call("y")]},
        {"role": "tool", "tool_call_id": "y", "content": "2"},
        {"role": "tool", "tool_call_id": "x", "content": "1"},
    ]
    results = [m for m in parse(messages=conversation).messages if isinstance(m, ToolResult)]
    assert [(r.tool, r.index, r.content) for r in results] == [("tide", 1, "1"), ("tide", 2, "2")]


@pytest.mark.parametrize(
    ("ids", "param"),
    [(["z"], "messages[2].tool_call_id"), (["x", "x"], "messages[3].tool_call_id")],
)
def test_a_result_without_an_open_call_is_refused(ids, param):
    conversation = [*HI, {"role": "assistant", "tool_calls": [call("x")]}]
    conversation += [{"role": "tool", "tool_call_id": i, "content": ""} for i in ids]
    assert refusal(messages=conversation).param == param


def test_arguments_that_are_json_but_no_object_are_refused():
    conversation = [*HI, {"role": "assistant", "tool_calls": [call("x", "[1]")]}]
    assert refusal(messages=conversation).param == "messages[1].tool_calls[0].function.arguments"


def test_what_was_given_out_may_be_sent_back():
    for content in ({"content": ""}, {"content": None}, {}):
        message = {"role": "assistant", "reasoning_content": "need it", "tool_calls": [call("c")]}
        back = parse(messages=[*HI, message | content, {"role": "tool", "tool_call_id": "c"}])
        assert (
            isinstance(back.messages[1], AssistantMessage)
            and back.messages[1].thoughts == "need it"
        )


def test_images_are_met_in_the_prompts_order():
    def image(url):
        return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}

    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, image("1")]},
        {"role": "assistant", "tool_calls": [call("x"), call("y")]},
        {"role": "tool", "tool_call_id": "y", "content": [image("3")]},
        {"role": "tool", "tool_call_id": "x", "content": [{"type": "image_url", "image_url": "2"}]},
    ]
    sources = image_sources(parse(messages=conversation).messages)
    assert [source.url for source in sources] == ["1", "2", "3"]
    assert [source.param for source in sources] == [
        "messages[0].content[1].image_url",
        "messages[3].content[0].image_url",
        "messages[2].content[0].image_url",
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs"),
        ({"structured_outputs": {"rexeg": "a"}}, "structured_outputs"),
        ({"tools": [TIDE, TIDE]}, "tools[1].function.name"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {}}]}, "tools[0].function.name"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_contradictions_are_refused_naming_the_field(fields, param):
    assert refusal(**fields).param == param


def test_a_script_is_an_unknown_field_unless_the_settings_allow_it():
    assert parse(baton_script="x").ignored == ("baton_script",)
    allowed = RequestLimits(
        models=frozenset({"nano"}), vocab=1536, context=64, eos=1282, scripted=True
    )
    request = parse(allowed, baton_script="x", baton_script_ends="length")
    assert request.script is not None and request.script.text == "x"
    assert not request.script.ends_message and request.ignored == ()


def test_every_case_of_this_endpoint_is_read_or_refused(request):
    path = request.config.rootpath / "tests/data/http_cases.jsonl"
    seen = Counter()
    for line in path.read_text().splitlines():
        case = json.loads(line)
        sent = case["request"]
        if sent["path"] != "/v1/chat/completions":
            continue
        raw = sent["raw_body"] if "raw_body" in sent else json.dumps(sent["body"])
        raw = raw.replace("{{model}}", "nano").replace("{{vocab_size}}", "1536")
        raw = raw.replace('"{{plain_token_id}}"', '"5"')
        try:
            parse_chat(raw.encode(), LIMITS)
            seen["read"] += 1
        except (InvalidRequest, NotFound):
            wanted = case["expect"]["status"]
            wanted = wanted if isinstance(wanted, list) else [wanted]
            assert 400 in wanted or 404 in wanted, case["id"]
            seen["refused"] += 1
    assert seen["read"] > 50 and seen["refused"] > 30


def test_a_least_length_needs_a_token_that_does_not_stop():
    everything = list(range(LIMITS.vocab))
    parse(stop_token_ids=everything)
    with pytest.raises(InvalidRequest, match="leave some out"):
        parse(stop_token_ids=everything, min_tokens=1)
