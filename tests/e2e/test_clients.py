"""Clients that people use already: the official ones, LiteLLM and LangChain, unchanged.

By default in front of fake rooms; the slow ones in front of `baton serve`. What the model says is
scripted, so that every client meets reasoning, text and calls.

Longer than 300 lines because each client has its own way of saying the same.
"""

from __future__ import annotations

import base64
import io
import json
import os
from dataclasses import dataclass

import httpx
import pytest
from PIL import Image

from tests.support.processes import eventually
from tests.support.sites import standing

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the network when imported
os.environ["LANGSMITH_TRACING"] = "false"

THOUGHT = "I think.<|close|>think<|sep|><|open|>response<|sep|>"
TEXT = "Hello, world."
END = "<|close|>message<|sep|>"
SAID = f"{TEXT}<|close|>response<|sep|>{END}"
CALL = (
    '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="tide" index="1"<|sep|>'
    '<|open|>argument key="port" type="string"<|sep|>Brest<|close|>argument<|sep|>'
    f"<|close|>call<|sep|><|close|>tools<|sep|>{END}"
)
SPEAK = {"baton_script": THOUGHT + SAID}
DO = {"baton_script": THOUGHT + CALL}
SCHEMA = {"type": "object", "properties": {"port": {"type": "string"}}, "required": ["port"]}
ASK = [{"role": "user", "content": "When is high tide at Brest?"}]


def slow(value: str):
    return pytest.param(value, marks=pytest.mark.slow)


def picture() -> str:
    data = io.BytesIO()
    Image.new("RGB", (56, 28), "red").save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


@dataclass
class Target:
    url: str
    model: str
    check: object


@pytest.fixture(scope="module")
def fakes():
    with standing() as place:
        yield Target(place.url, place.model, place.nothing_left)


@pytest.fixture(scope="module", params=["fakes", slow("server")])
def target(request):
    found = request.getfixturevalue(request.param)
    if request.param == "fakes":
        return found
    return Target(found.url, found.model, lambda: everything_back(found.admin_url))


def everything_back(admin_url: str) -> bool:
    keys = ("pages", "slots", "quarantine", "embeddings", "tickets")

    def is_empty() -> bool:
        replicas = httpx.get(f"{admin_url}/admin/inventory").json()["replicas"]
        return not any(replica[key] for replica in replicas for key in keys)

    eventually(is_empty, within_s=10)
    return True


@pytest.fixture(autouse=True)
def _nothing_left(target):
    yield
    assert target.check()


# The official client of OpenAI


@pytest.fixture(scope="module")
def openai(target):
    import openai

    with openai.OpenAI(base_url=f"{target.url}/v1", api_key="none", max_retries=0) as client:
        yield client


FUNCTION = {"type": "function", "function": {"name": "tide", "parameters": SCHEMA}}


def test_openai_chats_whole_and_streamed(openai, target):
    options = {"model": target.model, "messages": ASK, "max_tokens": 100, "extra_body": SPEAK}
    whole = openai.chat.completions.create(**options)
    assert whole.choices[0].message.content == TEXT
    assert whole.choices[0].message.reasoning_content == "I think."
    usage = {"include_usage": True}
    chunks = list(openai.chat.completions.create(**options, stream=True, stream_options=usage))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert chunks[-1].usage == whole.usage


def test_openai_sends_a_picture_and_gets_logprobs(openai, target):
    url = {"url": f"data:image/png;base64,{picture()}"}
    content = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": url}]
    whole = openai.chat.completions.create(
        model=target.model,
        messages=[{"role": "user", "content": content}],
        max_tokens=100,
        logprobs=True,
        top_logprobs=2,
        extra_body=SPEAK,
    )
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens


def test_openai_goes_around_a_tool_call_and_its_result(openai, target):
    options = {"model": target.model, "max_tokens": 200, "tools": [FUNCTION]}
    with openai.chat.completions.stream(**options, messages=ASK, extra_body=DO) as stream:
        message = stream.get_final_completion().choices[0].message
    [call] = message.tool_calls
    assert json.loads(call.function.arguments) == {"port": "Brest"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "06:12"}
    messages = [*ASK, message.model_dump(exclude_none=True), result]
    again = openai.chat.completions.create(**options, messages=messages, extra_body=SPEAK)
    assert again.choices[0].message.content == TEXT


def test_openai_completes_text_and_lists_models(openai, target):
    assert [model.id for model in openai.models.list()] == [target.model]
    options = {"model": target.model, "prompt": ["Once", "Twice"], "max_tokens": 4}
    whole = openai.completions.create(**options, echo=True, temperature=0)
    assert [c.index for c in whole.choices] == [0, 1]
    assert whole.choices[1].text.startswith("Twice")
    texts = {0: "", 1: ""}
    for chunk in openai.completions.create(**options, echo=True, temperature=0, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {c.index: c.text for c in whole.choices}


def test_openai_responds_whole_and_streamed(openai, target):
    options = {"model": target.model, "input": "hi", "max_output_tokens": 100, "extra_body": SPEAK}
    whole = openai.responses.create(**options)
    assert whole.output_text == TEXT
    assert whole.output[0].content[0].text == "I think."
    with openai.responses.stream(**options) as stream:
        seen = {event.type for event in stream}
        last = stream.get_final_response()
    assert last.output_text == TEXT
    assert {"response.created", "response.output_text.delta", "response.completed"} <= seen


def test_openai_responses_go_around_a_function_call(openai, target):
    tool = {"type": "function", "name": "tide", "parameters": SCHEMA, "strict": False}
    options = {"model": target.model, "max_output_tokens": 200, "tools": [tool]}
    with openai.responses.stream(**options, input=ASK, extra_body=DO) as stream:
        first = stream.get_final_response()
    call = first.output[-1]
    assert (call.type, json.loads(call.arguments)) == ("function_call", {"port": "Brest"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "06:12"}
    items = [*ASK, *(item.model_dump(exclude_none=True) for item in first.output), result]
    again = openai.responses.create(**options, input=items, extra_body=SPEAK)
    assert again.output_text == TEXT
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{picture()}"}
    shown = [{"role": "user", "content": [image, {"type": "input_text", "text": "What?"}]}]
    assert openai.responses.create(**options, input=shown, extra_body=SPEAK).status == "completed"


def test_openai_raises_its_own_errors(openai, target):
    from openai import BadRequestError, NotFoundError

    with pytest.raises(NotFoundError, match="other"):
        openai.chat.completions.create(model="other", messages=ASK)
    with pytest.raises(BadRequestError, match="previous_response_id"):
        openai.responses.create(model=target.model, input="hi", previous_response_id="resp_1")


# The official client of Anthropic


@pytest.fixture(scope="module")
def anthropic(target):
    import anthropic

    with anthropic.Anthropic(base_url=target.url, api_key="none", max_retries=0) as client:
        yield client


THINK = {"type": "enabled", "budget_tokens": 2048}
TOOL = {"name": "tide", "description": "High tide.", "input_schema": SCHEMA}


def test_anthropic_answers_whole_and_streamed(anthropic, target):
    options = {
        "model": target.model,
        "messages": ASK,
        "max_tokens": 100,
        "thinking": THINK,
        "extra_body": SPEAK,
    }
    whole = anthropic.messages.create(**options)
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert whole.content[1].text == TEXT
    with anthropic.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == TEXT
    assert last.content[0] == whole.content[0] and last.stop_reason == whole.stop_reason
    assert last.usage.output_tokens == whole.usage.output_tokens


def test_anthropic_goes_around_a_tool_call_with_a_picture_as_its_result(anthropic, target):
    options = {"model": target.model, "max_tokens": 200, "tools": [TOOL], "thinking": THINK}
    with anthropic.messages.stream(**options, messages=ASK, extra_body=DO) as stream:
        first = stream.get_final_message()
    call = first.content[-1]
    assert (first.stop_reason, call.input) == ("tool_use", {"port": "Brest"})
    source = {"type": "base64", "media_type": "image/png", "data": picture()}
    content = [{"type": "text", "text": "06:12"}, {"type": "image", "source": source}]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": content}
    messages = [
        *ASK,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    again = anthropic.messages.create(**options, messages=messages, extra_body=SPEAK)
    assert again.content[-1].text == TEXT
    counted = anthropic.messages.count_tokens(
        model=target.model, messages=messages, tools=[TOOL], thinking=THINK
    )
    used = again.usage
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens


def test_anthropic_raises_its_own_errors(anthropic, target):
    from anthropic import BadRequestError, NotFoundError

    with pytest.raises(NotFoundError, match="other"):
        anthropic.messages.create(model="other", max_tokens=5, messages=ASK)
    with pytest.raises(BadRequestError, match="end them with the user"):
        begun = [*ASK, {"role": "assistant", "content": "At"}]
        anthropic.messages.create(model=target.model, max_tokens=5, messages=begun)


# LiteLLM


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("provider", ["openai", slow("anthropic")])
def test_litellm_speaks_through_either_api(target, provider):
    import litellm

    options = {
        "model": f"{provider}/{target.model}",
        "api_base": f"{target.url}/v1" if provider == "openai" else target.url,
        "api_key": "none",
        "max_tokens": 200,
        "messages": ASK,
    }
    extra = {"extra_body": SPEAK} if provider == "openai" else SPEAK
    known = {"thinking": THINK, "allowed_openai_params": ["thinking"]}  # it knows models by name
    thinks = {} if provider == "openai" else known
    whole = litellm.completion(**options, **thinks, **extra)
    assert whole.choices[0].message.content == TEXT
    assert whole.choices[0].message.reasoning_content == "I think."
    pieces = litellm.completion(**options, **thinks, **extra, stream=True)
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == TEXT
    extra = {"extra_body": DO} if provider == "openai" else DO
    called = litellm.completion(**options, **thinks, **extra, tools=[FUNCTION])
    [call] = called.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"port": "Brest"}


# LangChain


def langchain(target, provider: str, **options):
    if provider == "anthropic":
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(
            model=target.model,
            base_url=target.url,
            api_key="none",
            max_tokens=3000,
            max_retries=0,
            thinking=THINK,
            model_kwargs={"extra_body": options["script"]},
        )
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model=target.model,
        base_url=f"{target.url}/v1",
        api_key="none",
        max_retries=0,
        max_tokens=3000,
        extra_body=options["script"],
        use_responses_api=provider == "responses",
    )


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("provider", ["openai", slow("responses"), slow("anthropic")])
def test_langchain_speaks_through_every_api(target, provider):
    from langchain_core.messages import HumanMessage, ToolMessage

    model = langchain(target, provider, script=SPEAK)
    url = f"data:image/png;base64,{picture()}"
    shown = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": url}}]
    human = HumanMessage(content=shown)
    assert said(model.invoke([human])) == TEXT
    assert "".join(said(piece) for piece in model.stream([human])) == TEXT
    acting = langchain(target, provider, script=DO).bind_tools([FUNCTION])
    first = acting.invoke([human])
    [call] = first.tool_calls
    assert (call["name"], call["args"]) == ("tide", {"port": "Brest"})
    result = ToolMessage(content="06:12", tool_call_id=call["id"])
    assert said(model.invoke([human, first, result])) == TEXT


def said(message) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(p.get("text", "") for p in message.content if p.get("type") == "text")
