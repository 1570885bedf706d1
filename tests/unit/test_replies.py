from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.contract.messages import TokenItem, TokenOut
from common.errors import InvalidRequest
from router.replies import ChatAnswer, Head
from router.schema import RequestLimits, parse_chat, parse_completion
from router.schema.replies import encode
from router.text_replies import TextAnswer
from tests.support.nano import nano_tokenizer

TOKENIZER = nano_tokenizer()
HEAD = Head(id="chatcmpl-1", created=1, model="nano")
LIMITS = RequestLimits(
    models=frozenset({"nano"}), vocab=TOKENIZER.vocab, context=8192, eos=1282, media_pad=1301
)
TOOL = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}
CALL = (
    '<|open|>tools<|sep|><|open|>call tool="tide" index="1"<|sep|><|open|>argument key="at" '
    'type="string"<|sep|>Brest<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
)
FULL = (
    "Need it.<|close|>think<|sep|><|open|>response<|sep|>Looking 🌊.<|close|>response<|sep|>"
    + CALL
    + "<|close|>message<|sep|><|end_of_msg|>"
)


def chat(**fields):
    body = {"model": "nano", "messages": [{"role": "user", "content": "hi"}]} | fields
    return ChatAnswer(parse_chat(json.dumps(body).encode(), LIMITS), TOKENIZER, HEAD)


def items(text, finish="stop", choice=0, cuts=(), logprobs=False):
    ids = TOKENIZER.encode_marked(text)
    outs = [
        TokenOut(id=i, logprob=-0.5, top=((i, -0.5), (5, -1.5))) if logprobs else TokenOut(id=i)
        for i in ids
    ]
    edges = sorted({0, len(outs), *(cut for cut in cuts if cut < len(outs))})
    shares = [outs[a:b] for a, b in pairwise(edges)] or [[]]
    last = len(shares) - 1
    return [
        TokenItem(
            request="r", choice=choice, tokens=tuple(share), finish=finish if i == last else ""
        )
        for i, share in enumerate(shares)
    ]


def whole(answer, shares):
    for share in shares:
        answer.take(share)
    return json.loads(encode(answer.whole(answer.usage(prompt=7))))


def joined(chunks):
    """Fields of a streamed reply, put together as clients do."""
    message = {"reasoning_content": "", "content": "", "tool_calls": []}
    finish = None
    for chunk in chunks:
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        for name in ("reasoning_content", "content"):
            message[name] += delta.get(name) or ""
        for piece in delta.get("tool_calls", ()):
            if piece["index"] == len(message["tool_calls"]):
                message["tool_calls"].append(
                    {"name": piece["function"]["name"], "arguments": "", "id": piece["id"]}
                )
            message["tool_calls"][piece["index"]]["arguments"] += piece["function"]["arguments"]
        assert finish is None, "a chunk came after the finish reason"
        finish = choice["finish_reason"]
    return message, finish


def stream(answer, shares):
    chunks = [*answer.opening(), *(chunk for share in shares for chunk in answer.chunks(share))]
    return [json.loads(encode(chunk)) for chunk in chunks]


@given(st.lists(st.integers(0, 300), max_size=30), st.sampled_from(["stop", "length"]))
def test_a_stream_adds_up_to_the_whole_reply(cuts, finish):
    reply = whole(chat(tools=[TOOL]), items(FULL, finish))
    (choice,) = reply["choices"]
    message, reason = joined(stream(chat(tools=[TOOL]), items(FULL, finish, cuts=cuts)))
    assert message["content"] == choice["message"]["content"] == "Looking 🌊."
    assert message["reasoning_content"] == choice["message"]["reasoning_content"] == "Need it."
    (call,) = choice["message"]["tool_calls"]
    assert message["tool_calls"][0]["arguments"] == call["function"]["arguments"]
    assert json.loads(call["function"]["arguments"]) == {"at": "Brest"}
    assert reason == choice["finish_reason"] == ("tool_calls" if finish == "stop" else "length")


def test_a_reply_of_calls_alone_has_no_content():
    (choice,) = whole(chat(tools=[TOOL]), items("x" + CALL))["choices"]
    assert choice["message"]["content"] is None


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL], "tool_choice": "none"}])
def test_calls_nobody_can_make_end_with_stop(fields):
    (choice,) = whole(chat(**fields), items(FULL))["choices"]
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]


def test_the_first_chunk_carries_the_role_before_any_token():
    first = json.loads(encode(chat().opening()[0]))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["choices"][0]["finish_reason"] is None
    assert first["object"] == "chat.completion.chunk" and "usage" not in first


def test_usage_comes_in_one_last_chunk_when_asked_for():
    answer = chat(stream=True, stream_options={"include_usage": True})
    chunks = stream(answer, items(FULL))
    assert all(chunk["usage"] is None for chunk in chunks)
    (last,) = answer.closing(answer.usage(prompt=7, cached=3, image=2))
    last = json.loads(encode(last))
    assert last["choices"] == [] and last["usage"]["prompt_tokens"] == 7
    count = len(TOKENIZER.encode_marked(FULL))
    assert last["usage"]["completion_tokens"] == count
    assert last["usage"]["total_tokens"] == 7 + count
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 3, "image_tokens": 2}
    reasoning = last["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert reasoning == len(TOKENIZER.encode("Need it."))
    assert chat().closing(answer.usage(prompt=1)) == []


def test_choices_are_told_apart_and_their_tokens_added():
    answer = chat(n=3)
    for index in (2, 0, 1):
        for share in items(f"{index}<|close|>response<|sep|>", choice=index):
            answer.take(share)
    assert answer.is_complete
    reply = json.loads(encode(answer.whole(answer.usage(prompt=7))))
    assert [c["message"]["content"] for c in reply["choices"]] == ["0", "1", "2"]
    one = len(TOKENIZER.encode_marked("0<|close|>response<|sep|>"))
    assert reply["usage"]["completion_tokens"] == 3 * one
    assert reply["usage"]["prompt_tokens"] == 7


THOUGHT = "x<|close|>think<|sep|><|open|>response<|sep|>"


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_stop_string_ends_the_answer_before_it(step):
    cuts = range(0, 200, step)
    text = THOUGHT + "ABC DEFGHIJKLM<|close|>response<|sep|>"
    chunks = stream(chat(stop=["DEFGHIJ"]), items(text, cuts=cuts))
    message, reason = joined(chunks)
    assert (message["content"], reason) == ("ABC ", "stop")
    answer = chat(stop=["DEFGHIJ"])
    (choice,) = whole(answer, items(text, "length", cuts=cuts))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("ABC ", "stop")


def test_text_that_only_began_a_stop_string_is_let_out():
    text = THOUGHT + "ABC DEFGH<|close|>response<|sep|><|close|>message<|sep|>"
    message, _ = joined(stream(chat(stop=["DEFGHIJ"]), items(text, cuts=range(99))))
    assert message["content"] == "ABC DEFGH"
    (choice,) = whole(chat(tools=[TOOL], stop=["e.x"]), items(THOUGHT + "see" + CALL))["choices"]
    assert choice["message"]["content"] == "see"


def test_stop_strings_are_not_looked_for_in_reasoning():
    text = "a STOP b<|close|>think<|sep|><|open|>response<|sep|>c"
    (choice,) = whole(chat(stop=["STOP"]), items(text))["choices"]
    assert choice["message"]["reasoning_content"] == "a STOP b"
    assert choice["message"]["content"] == "c"


def test_an_answer_without_a_think_channel_is_content():
    text = "Paris.<|close|>response<|sep|><|close|>message<|sep|>"
    (choice,) = whole(chat(), items(text))["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Paris."}
    message, _ = joined(stream(chat(), items(text, cuts=range(99))))
    assert message["content"] == "Paris."


def test_every_token_has_one_logprob_entry():
    count = len(TOKENIZER.encode_marked(FULL))
    fields = {"logprobs": True, "top_logprobs": 1}
    reply = whole(chat(**fields), items(FULL, logprobs=True))
    entries = reply["choices"][0]["logprobs"]["content"]
    chunks = stream(chat(**fields), items(FULL, cuts=range(0, 300, 2), logprobs=True))
    streamed = [
        entry
        for chunk in chunks
        for entry in (chunk["choices"][0].get("logprobs") or {"content": []})["content"]
    ]
    assert streamed == entries and len(entries) == count
    assert all(len(entry["top_logprobs"]) == 1 for entry in entries)
    text = b"".join(bytes(entry["bytes"] or []) for entry in entries)
    assert "Looking 🌊.".encode() in text
    assert [239, 191, 189] not in [entry["bytes"] for entry in entries]


def test_no_best_tokens_are_an_empty_list():
    reply = whole(chat(logprobs=True), items("hi", logprobs=True))
    assert reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert whole(chat(), items("hi"))["choices"][0]["logprobs"] is None


def test_a_probability_of_zero_is_written_as_a_number():
    share = TokenItem(
        request="r", choice=0, tokens=(TokenOut(id=5, logprob=float("-inf")),), finish="length"
    )
    entry = whole(chat(logprobs=True), [share])["choices"][0]["logprobs"]["content"][0]
    assert entry["logprob"] == -9999.0


def test_an_end_as_first_token_is_an_empty_answer():
    reply = whole(chat(), items("<|end_of_msg|>"))
    assert reply["choices"][0]["message"]["content"] == ""
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] == 1


def text(**fields):
    request = parse_completion(json.dumps({"model": "nano"} | fields).encode(), LIMITS)
    prompts = [
        list(TOKENIZER.encode(p)) if isinstance(p, str) else list(p) for p in request.prompts
    ]
    return TextAnswer(request, prompts, TOKENIZER, HEAD), prompts


def test_a_completion_is_its_text():
    answer, prompts = text(prompt="The answer is", echo=True)
    for share in items(" yes", "length"):
        answer.take(0, share)
    reply = json.loads(encode(answer.whole(answer.usage())))
    assert reply["object"] == "text_completion"
    assert reply["choices"][0]["text"] == "The answer is yes"
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["prompt_tokens"] == len(prompts[0])


@pytest.mark.parametrize("echo", [False, True])
def test_a_streamed_completion_adds_up_to_the_whole_one(echo):
    fields = {"prompt": ["a", [5, 6]], "n": 2, "logprobs": 1, "stop": ["END"]}
    if echo:
        fields = fields | {"echo": True, "logprobs": None}
    answer, _ = text(**fields)
    streaming, _ = text(**fields)
    chunks = list(streaming.opening())
    for prompt in (0, 1):
        for choice in (0, 1):
            for share in items(
                f"🌊 {prompt}{choice} END!", choice=choice, cuts=range(50), logprobs=True
            ):
                answer.take(prompt, share)
                chunks += streaming.chunks(prompt, share)
    reply = json.loads(encode(answer.whole(answer.usage())))
    texts = [""] * 4
    lists: list = [{"tokens": [], "text_offset": []} for _ in texts]
    for chunk in (json.loads(encode(chunk)) for chunk in chunks):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        for name in ("tokens", "text_offset"):
            lists[choice["index"]][name] += (choice["logprobs"] or {name: []})[name]
    assert texts == [choice["text"] for choice in reply["choices"]]
    assert texts[3].endswith("🌊 11 ") and streaming.is_complete
    if not echo:
        for choice, streamed in zip(reply["choices"], lists, strict=True):
            assert choice["logprobs"]["tokens"] == streamed["tokens"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [1536]}, "prompt"),
        ({"prompt": [1301]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": None}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ],
)
def test_a_completion_that_cannot_be_made_is_refused(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        text(**fields)
    assert caught.value.param == param
