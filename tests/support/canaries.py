"""Requests of many kinds that each carry words which no log line may repeat."""

from __future__ import annotations

import base64
from typing import Any

from tests.support.pictures import encoded, slope
from tests.support.scenes import data_uri

WORD = "xylophonequartz"  # in prompts, names, patterns, paths and values that are refused
KEY = "sk-canary-5f1b0c"
IMAGE = encoded(slope())
TRACE = "0af7651916cd43dd8448eb211c80319c"
HEADERS = {
    "Authorization": f"Bearer {KEY}",
    "traceparent": f"00-{TRACE}-b7ad6b7169203331-01",
}
# What a line may not hold: the words, the key, and the image in either form.
FORBIDDEN = (WORD, KEY, base64.b64encode(IMAGE).decode()[40:80])


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def picture(url: str) -> list[dict[str, Any]]:
    shown = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [shown, {"type": "text", "text": WORD}]}]


def requests(model: str) -> list[tuple[str, dict[str, Any]]]:
    """Paths and bodies: some are answered, most are refused one way or another."""
    chat, text = "/v1/chat/completions", "/v1/completions"
    short = {"model": model, "max_tokens": 4}
    tool = {"name": WORD, "parameters": {"type": "object", "properties": {WORD: {}}}}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": WORD}}}
    broken = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"pattern": f"{WORD}("}},
    }
    return [
        (chat, short | {"messages": picture(data_uri(IMAGE))}),
        (chat, short | {"messages": user(f"Say {WORD}."), "stop": [WORD], "n": 2, "user": WORD}),
        (text, short | {"prompt": [f"{WORD} one", f"{WORD} two"], "echo": True}),
        (chat, short | {"messages": user(WORD), "response_format": schema}),
        (chat, short | {"messages": user(WORD), "response_format": broken}),
        (chat, short | {"messages": user(WORD), "tools": [{"type": "function", "function": tool}]}),
        ("/v1/messages", short | {"messages": user(WORD), "system": WORD}),
        ("/v1/responses", {"model": model, "input": WORD, "max_output_tokens": 4}),
        ("/tokenize", {"model": model, "prompt": WORD}),
        (chat, short | {"messages": picture(data_uri(IMAGE[:-60]))}),
        (chat, short | {"messages": picture(f"http://127.0.0.1:9/{WORD}.png")}),
        (chat, short | {"messages": picture(f"data:image/png;base64,{WORD}")}),
        (chat, short | {"messages": user(WORD), "temperature": WORD}),
        (chat, short | {"messages": WORD}),
        (chat, short | {"messages": user(WORD * 12_000)}),
        (chat, {"model": WORD, "messages": user(WORD)}),
        (text, short | {"prompt": WORD, WORD: WORD}),
        (f"/v1/{WORD}", short),
    ]
