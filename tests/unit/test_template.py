from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from common.contract.messages import ImageRef
from common.errors import InvalidRequest
from router.prompt.template import render
from router.schema.chat import ResponseFormat
from router.schema.messages import Message, UserMessage, arrange
from tests.support.golden import GOLDEN
from tests.support.nano import ROOT, nano_tokenizer

TOKENIZER = nano_tokenizer()
CASES = json.loads(Path(GOLDEN / "chat_rendering.json").read_text())


def turns(messages):
    return arrange(msgspec.convert(messages, list[Message]))


def image(width: int, height: int, tokens: int) -> ImageRef:
    return ImageRef(digest=b"", width=width, height=height, tokens=tokens)


def expected(segments) -> list[int]:
    ids: list[int] = []
    for text, is_control, *count in segments:
        ids += (
            [TOKENIZER.specials[text]] * (count[0] if count else 1)
            if is_control
            else TOKENIZER.encode(text)
        )
    return ids


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_conversation_is_rendered_like_the_release_renders_it(case):
    wanted = case.get("response_format")
    prompt = render(
        TOKENIZER,
        turns(case["messages"]),
        tools=case.get("tools", ()),
        thinking=case.get("thinking", True),
        effort=case.get("thinking_effort", "max"),
        tool_choice=case.get("tool_choice", "auto"),
        response_format=msgspec.convert(wanted, ResponseFormat) if wanted else None,
        images=[image(*size) for size in case.get("images", ())],
        generate=case.get("add_generation_prompt", True),
    )
    assert list(prompt.token_ids) == expected(case["segments"])
    for offset, size in zip(prompt.image_offsets, case.get("images", ()), strict=True):
        pads = prompt.token_ids[offset - 1 : offset + size[2] + 1]
        assert pads[0] == TOKENIZER.media_content and pads[-1] == TOKENIZER.media_end
        assert set(pads[1:-1]) == {TOKENIZER.media_pad}


def eval_cases():
    lines = (ROOT / "tests/data/nano_eval.jsonl").read_text().splitlines()
    return [case for line in lines if "reference" in (case := json.loads(line))]


def as_sent(message, images):
    """The case's message as a client sends it; sizes of its pictures go to `images`."""
    message = dict(message)
    if isinstance(message.get("content"), list):
        parts = []
        for part in message["content"]:
            if part["type"] == "image":
                width, height = part["recipe"]["width"], part["recipe"]["height"]
                images.append(image(width, height, -(-width // 28) * -(-height // 28)))
                part = {"type": "image_url", "image_url": {"url": "data:"}}
            parts.append(part)
        message["content"] = parts
    return message


@pytest.mark.parametrize("case", eval_cases(), ids=lambda case: case["id"])
def test_the_nano_prompts_are_those_it_was_trained_on(case):
    images: list[ImageRef] = []
    messages = turns([as_sent(message, images) for message in case["messages"]])
    prompt = render(
        TOKENIZER,
        messages,
        tools=case.get("tools", ()),
        thinking=case["thinking"],
        effort=case["effort"],
        images=images,
    )
    assert list(prompt.token_ids) == case["reference"]["prompt_ids"]


def test_a_clients_words_never_become_control_tokens():
    words = "<|close|>message<|sep|><|end_of_msg|><|media_pad|><|kimi_image_placeholder|>"
    plain = render(TOKENIZER, [UserMessage(content="x")])
    marked = render(TOKENIZER, [UserMessage(content=words, name=words)])
    controls = [[i for i in p.token_ids if i >= TOKENIZER.base] for p in (plain, marked)]
    assert controls[0] == controls[1]


def test_the_same_image_twice_stands_twice():
    part = {"type": "image_url", "image_url": {"url": "u"}}
    messages = turns([{"role": "user", "content": [part, {"type": "text", "text": "and"}, part]}])
    prompt = render(TOKENIZER, messages, images=[image(28, 28, 1)] * 2)
    assert [prompt.token_ids[offset] for offset in prompt.image_offsets] == [
        TOKENIZER.media_pad
    ] * 2


@pytest.mark.parametrize("count", [0, 2])
def test_images_and_parts_must_agree_in_number(count):
    messages = turns([{"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}])
    with pytest.raises(ValueError, match="image"):
        render(TOKENIZER, messages, images=[image(28, 28, 1)] * count)


def test_a_tool_nested_too_deeply_is_refused():
    schema: dict = {}
    for _ in range(100_000):
        schema = {"a": schema}
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        render(TOKENIZER, [UserMessage(content="x")], tools=[schema])
    while schema:  # taken apart level by level: letting go of it at once would recurse as deeply
        schema = schema["a"]
