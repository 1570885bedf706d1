"""A grammar being written: rules in Lark's form, over text and control tokens.

Client's words enter only as literals, expressions or JSON written here, so that none of them can
name a control token or another rule. The dialect is the one `common/grammar` reads.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from common.errors import InvalidRequest
from router.prompt.tokenizer import Tokenizer

# White space a model may put between the parts of a JSON answer: at most seven blanks in a row, so
# that a weak model cannot fill its answer with them. Arguments are written as K3 writes them.
LOOSE = {"whitespace_pattern": r"[ \n]{1,7}"}
ANY_KEY = r"/[^\x00-\x1f\x7f\"&<>]+/"
TIGHT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Sheet:
    """Rules so far. Methods give back what may stand in another rule."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """An empty grammar over the tokenizer's ids."""
        self.any_text = f"<[0-{tokenizer.base - 1}]>*"  # ordinary tokens: no control token
        self.any_string = "/(?s:.*)/"  # whole characters only
        self._open, self._close = f"<[{tokenizer.open}]>", f"<[{tokenizer.close}]>"
        self._sep, self._end = f"<[{tokenizer.sep}]>", f"<[{tokenizer.end_of_msg}]>"
        self._rules: list[str] = []
        self._named: dict[str, str] = {}

    def source(self, start: str) -> str:
        """The whole text; `start` is the first rule."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules, ""])

    def add(self, name: str, body: str) -> str:
        """A rule (or, in capitals, a terminal) with a name of the caller's."""
        self._rules.append(f"{name}: {body}")
        return name

    def rule(self, body: str) -> str:
        """A rule of its own for `body`, the same one for the same text."""
        if body not in self._named:
            self._named[body] = self.add(f"x{len(self._named)}", body)
        return self._named[body]

    def opened(self, tag: str) -> str:
        """An open tag."""
        return f"{self._open} {literal(tag)} {self._sep}"

    def closed(self, tag: str) -> str:
        """A close tag."""
        return f"{self._close} {literal(tag)} {self._sep}"

    def argument(self, key: str, kind: str) -> str:
        """The open tag of an argument with a known key."""
        return self.opened(f'argument key="{attribute(key)}" type="{kind}"')

    def other_argument(self, known: Collection[str], kind: str) -> str:
        """The same with any key but the known ones."""
        key = ANY_KEY
        if known:
            key = f"{ANY_KEY} & ~({' | '.join(literal(attribute(k)) for k in known if k)})"
        end = literal(f'" type="{kind}"')
        begin = literal('argument key="')
        return f"{self._open} {begin} {self.terminal(key)} {end} {self._sep}"

    def terminal(self, body: str) -> str:
        """A terminal of its own for `body`: matched as a whole."""
        if body not in self._named:
            self._named[body] = self.add(f"X{len(self._named)}", body)
        return self._named[body]

    def ended(self) -> str:
        """The end of the message."""
        return f"{self.closed('message')} {self._end}"

    def json(self, schema: Mapping[str, Any] | bool, style: Mapping[str, Any]) -> str:
        """JSON text that follows a schema."""
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        return self.rule(f"%json {_dump({**schema, 'x-guidance': style})}")


def attribute(text: str) -> str:
    """A text as the value of a tag's attribute."""
    return text.replace("&", "&amp;").replace('"', "&quot;")


def literal(text: str) -> str:
    """Exactly this text; it must not be empty."""
    return json.dumps(text, ensure_ascii=False)


def choice(texts: list[str], param: str) -> str:
    """One of these texts.

    Raises:
        InvalidRequest: there is none, or an empty one.
    """
    if not texts or not all(texts):
        raise InvalidRequest(f"`{param}` needs at least one text, and none empty", param=param)
    return f"({' | '.join(map(literal, dict.fromkeys(texts)))})"


def expression(regex: str, param: str) -> str:
    """Text that a regular expression matches as a whole.

    Raises:
        InvalidRequest: the expression is empty, or ends in the middle of an escape.
    """
    if not regex:
        raise InvalidRequest(f"`{param}` is an empty expression", param=param)
    out, escaped = [], False
    for char in regex:
        if char == "/" and not escaped:
            out.append("\\/")
        else:
            out.append({"\n": "\\n", "\r": "\\r"}.get(char, char))
        escaped = char == "\\" and not escaped
    if escaped:  # it would take the end mark with it
        raise InvalidRequest(f"`{param}` ends in a lone backslash", param=param)
    return f"/{''.join(out)}/"


def _dump(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest("the schema is nested too deeply") from None
