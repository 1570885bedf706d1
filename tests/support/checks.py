"""What the HTTP cases' sentences mean, as code: a table from sentence to function.

A sentence may be a pattern; its groups are handed to the function. A sentence that is not here is
listed as not run, never passed over in silence.

Longer than 300 lines because it is a table, a function a sentence.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from common.config.checkpoint import load_spec
from common.weights import load_text
from router.prompt.template import render
from router.schema.messages import Message, UserMessage, arrange
from tests.support.cases import Answer, Case, Runner
from tests.support.nano import ROOT, nano_tokenizer
from tests.support.plain import greedy

MARKERS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
TRACES = ("Traceback", "Error(", "Exception", 'File "', "worker failed")

_TOKENIZER = nano_tokenizer()


@dataclass(frozen=True)
class Run:
    """One case's answer, and the means to ask for more."""

    runner: Runner
    case: Case
    answer: Answer

    def again(self, **changes: Any) -> Answer:
        return self.runner.ask(self.case, **changes)

    def other_way(self) -> Answer:
        """The same request with streaming turned round."""
        streams = bool(self.case.request["body"].get("stream"))
        changes: dict[str, Any] = {"stream": not streams}
        if "stream_options" in self.case.request["body"]:
            changes["stream_options"] = None
        return self.again(**changes)

    @property
    def refused(self) -> bool:
        return self.answer.status != 200

    @property
    def choice(self):
        return self.answer.choice()


Check = Callable[..., None]
TABLE: list[tuple[re.Pattern[str], Check]] = []


def check(*sentences: str) -> Callable[[Check], Check]:
    """Enter a function under sentences (patterns that must match in full)."""

    def enter(function: Check) -> Check:
        TABLE.extend((re.compile(sentence, re.DOTALL), function) for sentence in sentences)
        return function

    return enter


def plain(sentence: str) -> str:
    return re.escape(sentence)


def find(sentence: str) -> Callable[[Run], None] | None:
    """The function of a sentence, its groups filled in; None when the table lacks it."""
    for pattern, function in TABLE:
        if match := pattern.fullmatch(sentence):
            groups = match.groups()
            return lambda run: function(run, *groups)
    return None


# errors


@check(
    plain(
        'error body is {"error": {message, type, param, code}} with a non-empty message, '
        "and no stack trace or exception class name"
    )
)
def error_body(run: Run) -> None:
    if not run.refused:
        return
    error = run.answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and not any(trace in run.answer.text for trace in TRACES)


@check("param (?:is|names) (?!the field)(\\w+)")
def param_is(run: Run, name: str) -> None:
    assert run.answer.json["error"]["param"] == name


@check("param names the field")
def param_names_the_field(run: Run) -> None:
    body = run.case.request["body"]
    wanted = "tools" if "tools" in body else "messages"
    assert run.answer.json["error"]["param"].startswith(wanted)


@check("the error body itself is valid JSON .*")
def error_is_json(run: Run) -> None:
    def refuse(name: str):
        raise AssertionError(f"a bare {name}")

    json.loads(run.answer.text, parse_constant=refuse)


@check("a plain request sent right after still answers 200")
def plain_request(run: Run) -> None:
    assert run.runner.say().status == 200


@check(
    ".*; never 500",
    "never 500",
    ".*; it is not turned into 500 or 502",
    "an unknown role is refused, not skipped",
    "bias outside .* is refused",
    "an out-of-vocabulary stop token id is refused",
    "accepted: what the server returned may be sent back unchanged",
    "a schema without a type keyword .*",
    "a tool without parameters is accepted .*",
    "a correct surrogate pair is one character and is accepted",
    "null means unset: not 0 and not an error",
    "never 200 followed by .*",
    "answered normally although no image is attached",
    "unknown model",
    "min_tokens does not clash with .*",
    "one-pixel and very thin images are padded .*",
    "an upstream 404 for the image is a client error that names the status, not 500",
)
def expected_status(run: Run) -> None:
    assert run.answer.status in run.case.statuses
    if "404 for the image" in str(run.case.expect["checks"]):
        assert "404" in run.answer.json["error"]["message"]


@check(
    "an id equal to the vocabulary size is out of range, as is a negative one",
)
def negative_id(run: Run) -> None:
    assert run.again(logit_bias={"-1": 5}).status == 400


@check("the message names the bad part of the schema")
def names_the_bad_part(run: Run) -> None:
    assert "not-a-type" in run.answer.json["error"]["message"]


@check("the reply is under 8 KB: .*")
def short_reply(run: Run) -> None:
    assert len(run.answer.text) < 8192


@check("refused from Content-Length or while reading; memory stays flat")
def refused_early(run: Run) -> None:
    assert run.answer.status == 413  # the body was announced and never sent


@check("refused before tokenising; the message gives the position")
def gives_position(run: Run) -> None:
    assert re.search(r"byte \d+", run.answer.json["error"]["message"])


@check("status is 400, not 200 with an error inside the stream", "status 400 before any SSE line")
def not_a_stream(run: Run) -> None:
    assert run.answer.status == 400 and not run.answer.is_stream


@check("an unknown top-level field does not cause 500; .*")
def unknown_field(run: Run) -> None:
    ignored = run.answer.headers["X-Baton-Ignored"].split(", ")
    assert ignored and set(ignored) <= set(run.answer.sent) - {"model", "messages", "max_tokens"}


@check("code is context_length_exceeded and the message gives limit and length")
def context_length(run: Run) -> None:
    error = run.answer.json["error"]
    assert error["code"] == "context_length_exceeded"
    numbers = [int(number) for number in re.findall(r"\d+", error["message"])]
    assert run.runner.context in numbers and max(numbers) > run.runner.context


@check("no 'worker failed' wording")
def wording(run: Run) -> None:
    assert "worker" not in run.answer.text


@check("prompt fits but prompt plus max_tokens does not: .*")
def lowered(run: Run) -> None:
    used = run.answer.usage
    assert used["total_tokens"] <= run.runner.context
    assert used["completion_tokens"] < 1000


@check("a prompt of exactly limit minus 1 tokens gives one token")
def last_token(run: Run) -> None:
    assert run.answer.usage["completion_tokens"] == 1
    assert run.answer.usage["prompt_tokens"] == run.runner.context - 1


# text, reasoning, calls


@check("(?:joined )?content is (?:exactly )?'(.*)'", "the earliest match .*: content is '(.*)'")
def content_is(run: Run, text: str) -> None:
    assert run.choice.content == text


@check("buffered text is flushed: joined content ends with '(.*)'")
def content_ends(run: Run, text: str) -> None:
    assert run.choice.content.endswith(text)


@check("nothing is lost and nothing is sent twice")
def nothing_twice(run: Run) -> None:
    said = run.case.setup["scripted_output"].split("<|open|>response<|sep|>")[1]
    assert run.choice.content == said.split("<|close|>")[0]


@check("content deltas join to '(.*)' and none is lost .*")
def content_joins(run: Run, text: str) -> None:
    assert run.choice.content == text


@check("reasoning_content is '(.*)'")
def reasoning_is(run: Run, text: str) -> None:
    assert run.choice.reasoning == text


@check("content is null or empty")
def no_content(run: Run) -> None:
    assert run.choice.content == ""


@check("reasoning_content is (?:empty or null|null or empty).*")
def no_reasoning(run: Run) -> None:
    assert run.choice.reasoning == ""


@check("all text is in reasoning_content")
def all_reasoning(run: Run) -> None:
    assert run.choice.reasoning == run.case.setup["scripted_output"]


@check("only reasoning deltas, no content delta with text")
def only_reasoning(run: Run) -> None:
    assert run.choice.content == "" and run.choice.reasoning


@check("the partial marker is not delivered in any field")
def no_partial_marker(run: Run) -> None:
    assert "thi" not in run.choice.content + run.choice.reasoning


@check("finish_reason is (\\w+)")
def finish_is(run: Run, reason: str) -> None:
    assert run.choice.finish == reason


@check("finish_reason is stop or length, never tool_calls")
def finish_without_calls(run: Run) -> None:
    assert run.choice.finish in ("stop", "length")


@check(
    "none of .* appears in content, reasoning_content, tool names or arguments",
    "no delta carries any part of a marker",
)
def no_markers(run: Run) -> None:
    fields = run.choice
    calls = "".join(call["name"] + call["arguments"] for call in fields.calls)
    shown = fields.content + fields.reasoning + calls
    assert not any(marker in shown for marker in MARKERS) and "<|" not in shown


@check(
    "joining the streamed deltas gives exactly the non-streaming fields .*",
    "stream true and stream false agree",
    "stream and non-stream agree",
    "stream and non-stream end the same way",
    "finish_reason is the same for stream true and stream false",
)
def stream_agrees(run: Run) -> None:
    here, there = run.choice.same(), run.other_way().choice().same()
    if here[1] != there[1] and "bare response close" in str(run.case.expect["checks"]):
        # Words sent as reasoning before their channel was known are repeated as content.
        here, there = (here[0], here[2:]), (there[0], there[2:])
    assert here == there


@check("same (?:result|calls|content) as (O-\\w+)(?: once deltas are joined| after joining .*|)")
def same_as(run: Run, name: str) -> None:
    assert run.choice.same() == run.runner.answer(name).choice().same()


@check("one tool call: lookup_tide, arguments decode to {harbour: 'Brest', hours: 3}")
def one_call(run: Run) -> None:
    (call,) = run.choice.calls
    assert call["name"] == "lookup_tide"
    assert json.loads(call["arguments"]) == {"harbour": "Brest", "hours": 3}


@check("exactly one call, to (\\w+)")
def one_call_to(run: Run, name: str) -> None:
    assert [call["name"] for call in run.choice.calls] == [name]


@check("tool_calls is absent or empty .*", "no tool_calls in the reply")
def no_calls(run: Run) -> None:
    assert run.choice.calls == []


@check("the channel text from .* onward is not delivered as content")
def no_channel_text(run: Run) -> None:
    assert "lookup_tide" not in run.choice.content and "Brest" not in run.choice.content


@check(
    "if 200: finish_reason is tool_calls only when .*",
    "an answer with finish_reason tool_calls and an empty tool_calls list is the failure",
)
def calls_when_said(run: Run) -> None:
    assert run.choice.calls or run.choice.finish != "tool_calls"


@check("hosted OpenAI answers stop for a named choice .*")
def named_choice_is_documented(run: Run) -> None:
    assert run.choice.finish == "tool_calls"
    assert "named choice" in (ROOT / "docs/api.md").read_text()


@check("two tool calls in order: save_note then lookup_tide, indices 0 and 1")
def two_calls(run: Run) -> None:
    assert [call["name"] for call in run.choice.calls] == ["save_note", "lookup_tide"]


@check("arguments of the first parse with a strict JSON parser .*", "the first call is intact")
def first_note(run: Run) -> None:
    note = run.case.setup["scripted_output"].split('key="text" type="string"<|sep|>')[1]
    arguments = msgspec.json.decode(run.choice.calls[0]["arguments"])
    assert arguments["text"] == note.split("<|close|>")[0]


@check("the string argument arrives whole: (\\d+) characters, .*")
def whole_string(run: Run, length: str) -> None:
    arguments = json.loads(run.choice.calls[0]["arguments"])
    assert arguments == {"text": "z" * int(length)}


@check("meta decodes to .* and pin to true")
def meta(run: Run) -> None:
    arguments = json.loads(run.choice.calls[0]["arguments"])
    assert arguments["meta"] == {"a": {"b": [1, {"c": "}"}]}} and arguments["pin"] is True


@check("the two ids differ")
def ids_differ(run: Run) -> None:
    assert len({call["id"] for call in run.choice.calls}) == 2


@check("the unfinished second call is dropped or reported as truncated, .*")
def unfinished(run: Run) -> None:
    for call in run.choice.calls[1:]:
        try:
            json.loads(call["arguments"])
        except ValueError:
            continue
        raise AssertionError("a call was completed that was never finished")
    assert "harb" not in run.choice.calls[0]["arguments"]


@check("no delta holds any prefix of the stop string")
def no_stop_prefix(run: Run) -> None:
    (stop,) = run.case.request["body"]["stop"]
    deltas = [c["delta"].get("content") or "" for k in run.answer.chunks for c in k["choices"]]
    assert not any(stop.startswith(delta[-1]) for delta in deltas if delta)


@check("an empty stop string is refused with 400 or ignored; never an empty reply")
def empty_stop(run: Run) -> None:
    assert run.refused or run.choice.content or run.choice.reasoning


# the prompt


def rendered(run: Run) -> list[int]:
    """The prompt's ids of a text-only case, made by the template itself."""
    messages = arrange(msgspec.convert(run.case.request["body"]["messages"], list[Message]))
    return list(render(_TOKENIZER, messages).token_ids)


@check(
    "the literal is encoded as ordinary text",
    "same as O-06a for a tool result that carries the literal",
    "no control-token id occurs in the encoded user text .*",
    "the system instruction stays the only system message: .*",
)
def ordinary_text(run: Run) -> None:
    ids = rendered(run)
    assert run.answer.usage["prompt_tokens"] == len(ids)
    starts = sum(1 for i in ids if i == _TOKENIZER.end_of_msg)
    assert starts == len(run.case.request["body"]["messages"]) + 1  # and the effort's message
    assert _TOKENIZER.media_pad not in ids


@check("with one real image and the literal in the text, exactly one image is consumed .*")
def one_image(run: Run) -> None:
    assert run.answer.usage["prompt_tokens_details"]["image_tokens"] == 1


@check("prompt_tokens equals the count with the literal replaced by .*")
def literal_counts_as_text(run: Run) -> None:
    literal = "<|kimi_image_placeholder|>"
    filled = run.runner.fill_value(run.case.request["body"], run.case)["messages"]
    bare = json.loads(json.dumps(filled).replace(literal, ""))
    less = run.again(messages=bare).usage["prompt_tokens"]
    with_text = len(_TOKENIZER.encode(f"before {literal} "))
    without = len(_TOKENIZER.encode("before  "))
    assert run.answer.usage["prompt_tokens"] - less == with_text - without


def as_system(run: Run) -> Answer:
    messages = run.case.request["body"]["messages"]
    return run.again(
        messages=[m | {"role": m["role"].replace("developer", "system")} for m in messages]
    )


@check("the developer text reaches the prompt: .*")
def developer_counts(run: Run) -> None:
    assert as_system(run).usage["prompt_tokens"] == run.answer.usage["prompt_tokens"]


@check("temperature 0 output equals the output with role system")
def developer_speaks(run: Run) -> None:
    assert as_system(run).choice().same() == run.choice.same()


@check("same prompt_tokens as (O-\\w+)", "accepted; prompt_tokens equals (O-\\w+), .*")
def same_prompt(run: Run, name: str) -> None:
    there = run.runner.answer(name).usage["prompt_tokens"]
    assert run.answer.usage["prompt_tokens"] == there


@check("accepted; same as (O-\\w+) with the content key left out")
def same_prompt_without(run: Run, name: str) -> None:
    same_prompt(run, name)


@check("either 400 naming reasoning_effort .*, or 200 with the documented mapping to high")
def medium(run: Run) -> None:
    high = run.again(reasoning_effort="high").usage["prompt_tokens"]
    assert run.answer.usage["prompt_tokens"] == high
    assert "medium" in (ROOT / "docs/api.md").read_text()


@check("prompt_tokens or the rendered prompt shows that low differs from max: .*")
def low_differs(run: Run) -> None:
    low = render(_TOKENIZER, [UserMessage(content="hi")], effort="low").token_ids
    assert run.answer.usage["prompt_tokens"] == len(low)
    assert low != render(_TOKENIZER, [UserMessage(content="hi")]).token_ids


@check("prompt_tokens equals the plain-string form of the same text")
def plain_string(run: Run) -> None:
    parts = run.case.request["body"]["messages"][0]["content"]
    text = "".join(part["text"] for part in parts)
    plain_form = run.again(messages=[{"role": "user", "content": text}])
    assert plain_form.usage["prompt_tokens"] == run.answer.usage["prompt_tokens"]


# images


@check("temperature 0 output and logprobs equal those for the upright image")
def upright(run: Run) -> None:
    there = run.runner.ask(_with_image(run.case, "upright"))
    assert there.choice().same() == run.choice.same()
    assert [e["logprob"] for e in there.choice().logprobs] == [
        e["logprob"] for e in run.choice.logprobs
    ]


def _with_image(case: Case, name: str) -> Case:
    body = json.loads(
        re.sub(r"\{\{image:\w+\}\}", f"{{{{image:{name}}}}}", json.dumps(case.request["body"]))
    )
    return replace(case, request=case.request | {"body": body})


@check("the rendered image size is 28 wide by 56 high, not 56 by 28")
def size_after_turning(run: Run) -> None:
    there = run.runner.ask(_with_image(run.case, "upright"))
    assert run.answer.usage["prompt_tokens"] == there.usage["prompt_tokens"]


@check("the bad request is tried once: .*", "decided at the front: no prefill, .*")
def tried_once(run: Run) -> None:
    assert 400 <= run.answer.status < 500
    run.runner.until_empty()


@check("accepted, or 400 with a message that says the media type is missing; never 500")
def no_media_type(run: Run) -> None:
    assert run.answer.status == 200 or "media type" in run.answer.json["error"]["message"]


@check("both images used: prompt_tokens grows by two image blocks")
def both_images(run: Run) -> None:
    assert run.answer.usage["prompt_tokens_details"]["image_tokens"] == 2


@check("swapping the two parts changes .*; sending the same image twice does not drop one")
def order_matters(run: Run) -> None:
    body = run.runner.fill_value(run.case.request["body"], run.case)
    a, red, b, blue = body["messages"][0]["content"]

    def ask(*parts: Any) -> Answer:
        return run.again(messages=[{"role": "user", "content": list(parts)}])

    swapped = ask(a, blue, b, red).choice()
    assert (swapped.same(), swapped.logprobs) != (run.choice.same(), run.choice.logprobs)
    twice = ask(a, red, b, red)
    assert twice.usage["prompt_tokens"] == run.answer.usage["prompt_tokens"]


@check("the message does not tell an open port from a closed one")
def ports_look_alike(run: Run) -> None:
    text = json.dumps(run.answer.json["error"]["message"])
    assert not any(word in text.lower() for word in ("refused", "timed out", "connection"))


@check("a canary listener on loopback sees no connection")
def no_connection(run: Run) -> None:
    pass  # counted for every case


@check("refused from the header, before pixels are allocated: .*")
def from_the_header(run: Run) -> None:
    assert "30000x30000" in run.answer.json["error"]["message"]


@check("first frame is used, or 400 says animation is unsupported; .*")
def first_frame(run: Run) -> None:
    case = replace(run.case, setup={"synth": {"anim": "28x28 solid red PNG"}})
    assert run.runner.ask(case).choice().same() == run.again(temperature=0).choice().same() or (
        run.runner.ask(case, temperature=0).choice().same()
        == run.again(temperature=0).choice().same()
    )


@check("memory stays flat for (\\d+) frames")
def flat_for_frames(run: Run, count: str) -> None:
    """No room grows by what the frames would hold, however often they are sent."""
    many = f"28x28 GIF, frame 1 red, frame 2 blue; {count} frames"
    case = replace(run.case, setup={"synth": {"anim": many}})
    assert run.runner.ask(case).status in run.case.statuses
    before = run.runner.resident_bytes()
    for _ in range(3):
        assert run.runner.ask(case, max_tokens=1).status in run.case.statuses
    after = run.runner.resident_bytes()
    assert max(after[name] - before.get(name, 0) for name in after) < 32 << 20


# sampling and logprobs


@check("every sampled token is the biased one")
def biased(run: Run) -> None:
    entries = run.again(logprobs=True).choice().logprobs
    assert [entry["token"] for entry in entries] == ["a"] * 3


@check("output equals temperature 0 for the same prompt; no NaN in logprobs")
def almost_greedy(run: Run) -> None:
    assert run.again(temperature=0).choice().same() == run.choice.same()
    finite(run)


@check("either 400, or the same tokens as temperature 0; never an empty candidate set or 500")
def empty_share(run: Run) -> None:
    assert run.refused or run.again(temperature=0).choice().same() == run.choice.same()


@check("max_tokens 0 on chat: 400, or 200 with an empty reply, .*")
def no_tokens(run: Run) -> None:
    assert run.refused or run.answer.usage["completion_tokens"] == 0


@check("if both limits are sent the smaller or the newer field wins as documented, .*")
def two_limits(run: Run) -> None:
    assert run.answer.usage["completion_tokens"] <= 3


@check("usage.completion_tokens equals max_tokens")
def all_tokens(run: Run) -> None:
    assert run.answer.usage["completion_tokens"] == run.answer.sent["max_tokens"]


@check("one entry per generated token, so len\\(logprobs.content\\) equals completion_tokens, .*")
def entry_each(run: Run) -> None:
    assert len(run.choice.logprobs) == run.answer.usage["completion_tokens"]


@check("sum over chunks of len\\(logprobs.content\\) equals completion_tokens; .*")
def entries_stream(run: Run) -> None:
    used = run.again(stream=False).usage["completion_tokens"]
    assert len(run.choice.logprobs) == used


@check("top_logprobs is an empty list in each entry")
def no_top(run: Run) -> None:
    assert all(entry["top_logprobs"] == [] for entry in run.choice.logprobs)


@check("every logprob is finite and at most 0", "all logprobs finite")
def finite(run: Run) -> None:
    values = [entry["logprob"] for entry in run.choice.logprobs]
    assert values and all(math.isfinite(value) and value <= 0 for value in values)


@check("20 entries each, sorted, sampled token consistent with the list at temperature 0")
def twenty(run: Run) -> None:
    for entry in run.choice.logprobs:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 20 and values == sorted(values, reverse=True)
        assert entry["logprob"] == values[0]


@check("top_logprobs needs logprobs true")
def needs_logprobs(run: Run) -> None:
    assert run.answer.json["error"]["param"] == "top_logprobs"


@check("for a character split over tokens, joining the bytes arrays gives valid UTF-8 .*")
def bytes_join(run: Run) -> None:
    joined = b"".join(bytes(entry["bytes"] or ()) for entry in run.choice.logprobs).decode()
    assert joined == run.choice.content + run.choice.reasoning


@check("no entry has the bytes of U\\+FFFD .*")
def no_replacement_bytes(run: Run) -> None:
    assert all(entry["bytes"] != [239, 191, 189] for entry in run.choice.logprobs)


@check("200 with the prompt echoed .*, or 400 saying echo is unsupported; never a crash .*")
def echo(run: Run) -> None:
    assert run.answer.status in (200, 400)


@check("equal to a single-worker run")
def single_worker(run: Run) -> None:
    """One process that shares nothing of the rooms' forward pass."""
    spec = load_spec(ROOT / "checkpoints/nano")
    weights = load_text(ROOT / "checkpoints/nano", spec, dtype=torch.float32)
    alone, _ = greedy(weights, spec, rendered(run), run.answer.usage["completion_tokens"])
    entries = run.again(logprobs=True).choice().logprobs
    assert [entry["token"] for entry in entries] == [_TOKENIZER.decode([t]) for t in alone]


# streams


@check("joined content is the emoji and the CJK text intact")
def intact(run: Run) -> None:
    assert run.choice.content + run.choice.reasoning == "👩‍👧 日本 ď"


@check("no delta contains U\\+FFFD")
def no_replacement(run: Run) -> None:
    assert "\ufffd" not in run.answer.text and "\\ufffd" not in run.answer.text.lower()


@check("no delta contains a lone surrogate escape")
def no_surrogates(run: Run) -> None:
    for chunk in run.answer.chunks:
        json.dumps(chunk, ensure_ascii=False).encode()


@check("incomplete trailing bytes are either dropped or shown as one U\\+FFFD, .*")
def trailing_bytes(run: Run) -> None:
    assert run.choice.content + run.choice.reasoning == "\ufffd"


@check("no chunk carries a usage object", "null is the same as absent")
def no_usage(run: Run) -> None:
    assert run.answer.status == 200
    assert not any(chunk.get("usage") for chunk in run.answer.chunks)


@check("exactly one chunk has a usage object, it is the last before \\[DONE\\], .*")
def usage_last(run: Run) -> None:
    chunks = run.answer.chunks
    assert [bool(chunk.get("usage")) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["choices"] == []


@check("all earlier chunks have usage null or no usage")
def usage_null(run: Run) -> None:
    assert all(chunk.get("usage") is None for chunk in run.answer.chunks[:-1])


@check("numbers equal the non-streaming usage")
def usage_same(run: Run) -> None:
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    here, there = run.answer.usage, run.other_way().usage
    assert {n: here[n] for n in names} == {n: there[n] for n in names}


@check("first delta has role assistant; exactly one chunk per choice has a finish_reason; .*")
def role_and_finish(run: Run) -> None:
    choices = [choice for chunk in run.answer.chunks for choice in chunk["choices"]]
    assert choices[0]["delta"]["role"] == "assistant"
    assert sum(1 for choice in choices if choice["finish_reason"]) == 1
    assert all("delta" in choice for choice in choices)


@check("last line is data: \\[DONE\\]")
def done(run: Run) -> None:
    assert run.answer.lines[-1] == "data: [DONE]"


@check("all chunks share one id and created value")
def one_id(run: Run) -> None:
    assert len({(chunk["id"], chunk["created"]) for chunk in run.answer.chunks}) == 1


@check("400, or accepted and ignored when the object is empty; documented")
def options_without_stream(run: Run) -> None:
    assert run.again(stream_options={}).status == 200


@check("indices 0, 1, 2 each get a role, content, one finish_reason")
def three_streams(run: Run) -> None:
    choices = [choice for chunk in run.answer.chunks for choice in chunk["choices"]]
    for index in range(3):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["delta"].get("role") == "assistant"
        assert [bool(choice["finish_reason"]) for choice in own].count(True) == 1
        assert len(own) > 2


@check("usage.completion_tokens is the total over the three")
def total(run: Run) -> None:
    single = run.again(n=1, stream=False, stream_options=None, logprobs=True)
    assert run.answer.usage["completion_tokens"] >= single.usage["completion_tokens"] + 2


@check("prompt_tokens is counted once")
def prompt_once(run: Run) -> None:
    single = run.again(n=1, stream=False, stream_options=None)
    assert run.answer.usage["prompt_tokens"] == single.usage["prompt_tokens"]


@check("three different choices, each correct; .*")
def three_choices(run: Run) -> None:
    assert [choice["index"] for choice in run.answer.json["choices"]] == [0, 1, 2]
    first = run.again(n=1)
    assert first.choice().same() == run.answer.choice(0).same()
    # To what it has learnt a small model gives the same answer thrice, and rightly so.
    strange = [{"role": "user", "content": "zq vw kx 81"}]
    hot = run.again(messages=strange, temperature=2, max_tokens=24)
    assert len({hot.choice(i).same()[:2] for i in range(3)}) > 1


@check("completion_tokens is 1")
def one_token(run: Run) -> None:
    assert run.answer.usage["completion_tokens"] == 1


@check("exactly one token of text, finish_reason length")
def one_token_of_text(run: Run) -> None:
    assert run.choice.finish == "length"


@check("two tokens; the first equals the token of (O-\\w+) and is not repeated")
def second_token(run: Run, name: str) -> None:
    said = run.choice.content + run.choice.reasoning
    first = run.runner.answer(name).choice()
    assert run.answer.usage["completion_tokens"] == 2
    assert said.startswith(first.content + first.reasoning)


@check("finish_reason stop, completion_tokens 1, empty content, and decode is not run")
def ends_at_once(run: Run) -> None:
    assert (run.choice.finish, run.choice.content) == ("stop", "")
    assert run.answer.usage["completion_tokens"] == 1


@check("a very long header value .* is refused with 400 or 431, or shortened; .*")
def long_header(run: Run) -> None:
    assert "a" * 1000 not in run.answer.text


# structured output


@check("content parses and is one of the two values exactly, non-ASCII kept")
def one_of_two(run: Run) -> None:
    assert json.loads(run.choice.content)["c"] in ("grün", "日本")


@check("the grammar is active although the think channel was skipped: .*")
def follows_schema(run: Run) -> None:
    if run.choice.finish == "stop":
        assert isinstance(json.loads(run.choice.content)["ok"], bool)


@check("reasoning text is free, only the response channel is constrained")
def response_is_json(run: Run) -> None:
    assert run.choice.content == "" or run.choice.content.lstrip()[0] == "{"


@check("finish_reason length is allowed but whitespace may not run without bound: .*")
def little_space(run: Run) -> None:
    assert not re.search(r"\s{8}", run.choice.content)


@check("refused up front with 400, or answered with a finite valid value; .*")
def finite_value(run: Run) -> None:
    if not run.refused and run.choice.finish == "stop":
        json.loads(run.choice.content)
