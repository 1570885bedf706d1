"""A chat request told in another API's words: the words, and the way back for refusals.

Another API's body is translated into the fields of a chat, and checked by the chat's own rules. A
refusal then names a field that the client never sent; `Words` puts the client's name in its place.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from common.errors import InvalidRequest
from router.schema.chat import ChatRequest, check_chat
from router.schema.limits import RequestLimits

SCRIPT_FIELDS = ("baton_script", "baton_script_ids", "baton_script_ends")

_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.content\[(\d+)\])?[\w.\[\]]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """The client's names of what a chat request calls otherwise.

    `places[i]` is where the chat's message i came from, `parts[i]` where each part of its content
    did, if that is told; `names` holds pairs of paths, the longer before the shorter.
    """

    places: tuple[str, ...]
    parts: tuple[tuple[str, ...], ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    call_id: str = "call_id"  # of a result, the field that names its call

    @contextmanager
    def told(self) -> Iterator[None]:
        """Refusals that leave the block name the client's fields.

        Raises:
            InvalidRequest: what the block raised, of the same kind, in the client's words.
        """
        try:
            yield
        except InvalidRequest as error:
            param = None if error.param is None else self.back(error.param)
            raise type(error)(self.back(str(error)), param=param) from None

    def back(self, text: str) -> str:
        """A path, or a sentence with paths, in the client's words."""
        text = _MESSAGE.sub(self._place, text)
        for ours, theirs in self.names.items():
            text = re.sub(ours, theirs, text)
        return text

    def _place(self, match: re.Match[str]) -> str:
        index = int(match[1])
        if index >= len(self.places):
            return match[0]
        parts = self.parts[index] if index < len(self.parts) else ()
        if match[2] is not None and int(match[2]) < len(parts):
            return parts[int(match[2])]
        tail = f".{self.call_id}" if match[0].endswith(".tool_call_id") else ""
        return self.places[index] + tail


@dataclass(frozen=True, slots=True, kw_only=True)
class Translated:
    """A checked chat request, the client's words for it, and the body it came in."""

    chat: ChatRequest
    words: Words
    raw: Mapping[str, Any]


def check_translated(
    fields: dict[str, Any],
    words: Words,
    *,
    raw: Mapping[str, Any],
    ignored: tuple[str, ...],
    limits: RequestLimits,
) -> Translated:
    """Check the fields of a chat made of `raw`; `ignored` names fields that had no effect.

    Raises:
        InvalidRequest: what is wrong, in the client's words.
        NotFound: the model is not served here.
    """
    if limits.scripted:
        fields |= {name: raw[name] for name in SCRIPT_FIELDS if name in raw}
        ignored = tuple(name for name in ignored if name not in SCRIPT_FIELDS)
    with words.told():
        chat = check_chat({k: v for k, v in fields.items() if v is not None}, limits)
    return Translated(
        chat=dataclasses.replace(chat, ignored=ignored),
        words=words,
        raw=raw,
    )
