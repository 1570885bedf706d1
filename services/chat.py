"""`baton chat`: a conversation in the terminal with a running server."""

from __future__ import annotations

import json
from pathlib import Path

import httpx

from common.errors import ConfigError, ServingError


def run_chat(url: str, model: str, image: Path | None, key: str = "") -> int:
    """A conversation; an empty line or end of input ends it.

    `key` is never an argument of the command, which every process here could read.
    """
    picture = _data_uri(image) if image is not None else ""
    base = url.rstrip("/").removesuffix("/v1")  # as other clients are told it
    with httpx.Client(base_url=base, timeout=600, headers=shown(key)) as client:
        if not model:
            listed = client.get("/v1/models")
            _refuse_unknown(listed, key)
            model = listed.raise_for_status().json()["data"][0]["id"]
        messages: list[dict[str, object]] = []
        while text := _ask():
            content: object = text
            if picture:
                content = [
                    {"type": "image_url", "image_url": {"url": picture}},
                    {"type": "text", "text": text},
                ]
                picture = ""
            messages.append({"role": "user", "content": content})
            answer = _stream(client, {"model": model, "messages": messages, "stream": True})
            messages.append({"role": "assistant", "content": answer})
    return 0


def shown(key: str) -> dict[str, str]:
    """The header that shows a key.

    Raises:
        ConfigError: no header can carry it.
    """
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("the key has characters that no header can carry; give it as it was made")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _data_uri(path: Path) -> str:
    import base64
    import mimetypes

    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _stream(client: httpx.Client, body: dict[str, object]) -> str:
    answer = ""
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            response.read()
            _refuse_unknown(response, client.headers.get("Authorization", ""))
            raise ServingError(response.json()["error"]["message"])
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ServingError(event["error"]["message"])
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or ""
                answer += piece
                print(piece, end="", flush=True)
    print()
    return answer


def _refuse_unknown(response: httpx.Response, key: str) -> None:
    """Say what to do about a key that is missing or wrong."""
    if response.status_code == 401:
        what = "does not know the key that it was shown" if key else "wants a key"
        raise ConfigError(
            f"{response.request.url} {what}; put it into BATON_API_KEY, or into a file for "
            "--key-file"
        )
