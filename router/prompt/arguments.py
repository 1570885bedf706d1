"""A tool's parameters as rules for K3's typed arguments: strings raw, everything else as JSON.

Every declared argument comes at most once, in the order of its declaration, the required ones
always. Others come only where the schema invites them (`additionalProperties`, or no `properties`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.errors import InvalidRequest
from router.prompt.schemas import Schema, resolve
from router.prompt.sheet import TIGHT, Sheet, choice, expression

TYPES = {  # JSON schema's types and what K3 calls them
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "object",
    "array": "array",
}
ALL = ("string", "number", "boolean", "null", "object", "array")
_DAY = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_HOUR = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](\.[0-9]+)?(Z|[+\-]{_HOUR})"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_HEX = "[0-9a-fA-F]"
FORMATS = {
    "date": _DAY,
    "time": _TIME,
    "date-time": f"{_DAY}T{_TIME}",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "email": r"[A-Za-z0-9_+\-]+(\.[A-Za-z0-9_+\-]+)*@[A-Za-z0-9\-]+(\.[A-Za-z0-9\-]+)+",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
}

# Beside `properties`, what the object of all arguments may say.
_NOTES = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated"}
_FRAME = {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "$defs",
    "definitions",
    "strict",
}
_FORCED = {"anyOf", "allOf", "oneOf", "patternProperties", "minProperties", "maxProperties", "enum"}


class Parameters:
    """The rules of one tool."""

    def __init__(self, sheet: Sheet, schema: Schema, param: str) -> None:
        """`schema` was checked; `param` names it in errors."""
        self._sheet, self._root, self._param = sheet, schema, param

    def write(self) -> str:
        """All arguments of a call.

        Raises:
            InvalidRequest: what of the schema cannot be enforced in arguments.
        """
        frame = resolve(self._root, self._root, self._param)
        if not isinstance(frame, Mapping) or frame.get("type", "object") != "object":
            raise self._fault("arguments are an object; its type must be object")
        for word in _FORCED & frame.keys():
            raise self._fault(f"`{word}` is not supported beside all arguments of a tool")
        properties: Mapping[str, Any] = frame.get("properties") or {}
        required = frame.get("required") or []
        parts = [
            self._argument(key, schema, is_required=key in required)
            for key, schema in properties.items()
        ]
        more = frame.get("additionalProperties", not properties)
        for key in [key for key in required if key not in properties]:
            if more is False:
                raise self._fault(f"`{key}` is required but not declared")
            parts.append(self._argument(key, more, is_required=True))
        known = {*properties, *required}
        if more is not False and (
            rule := self._one(more, lambda kind: self._sheet.other_argument(known, kind))
        ):
            parts.append(f"({rule})*")
        return " ".join(part for part in parts if part)

    def _argument(self, key: str, schema: Any, *, is_required: bool) -> str:
        rule = self._one(schema, lambda kind: self._sheet.argument(key, kind))
        if not rule and is_required:
            raise self._fault(f"no value is allowed for `{key}`, which is required")
        return rule if is_required or not rule else f"({rule})?"

    def _one(self, schema: Any, tag: Callable[[str], str]) -> str:
        """One argument: a tag with the value's type, and the value; empty if there is none."""
        ways = [f"{tag(kind)} {value}" for kind, value in dict.fromkeys(self._values(schema, ()))]
        if not ways:
            return ""
        return self._sheet.rule(f"({' | '.join(ways)}) {self._sheet.closed('argument')}")

    def _values(self, schema: Any, above: tuple[str, ...]) -> list[tuple[str, str]]:
        """Every type the value may have, with the rule of such a value."""
        if schema is False:
            return []
        schema = {} if schema is True else schema
        if isinstance(ref := schema.get("$ref"), str):
            if ref in above:
                return []  # `anyOf` that leads back to itself adds nothing
            above = (*above, ref)
            schema = resolve(self._root, schema, self._param)
            return self._values(schema, above)
        if "const" in schema or "enum" in schema:
            return self._listed([schema["const"]] if "const" in schema else schema["enum"])
        for word in ("anyOf", "oneOf", "allOf"):
            if word in schema:
                return self._united(schema, word, above)
        kinds = schema.get("type", ALL)
        return [
            self._typed(kind, schema) for kind in ([kinds] if isinstance(kinds, str) else kinds)
        ]

    def _united(self, schema: Schema, word: str, above: tuple[str, ...]) -> list[tuple[str, str]]:
        beside = schema.keys() - _NOTES - {word}
        branches: Sequence[Any] = schema[word]
        if beside and not (len(branches) == 1 and word == "allOf" and not beside - {"nullable"}):
            raise self._fault(f"`{min(beside)}` beside `{word}` in an argument is not supported")
        if word == "allOf" and len(branches) != 1:
            raise self._fault("`allOf` with several parts in an argument is not supported")
        found = [self._values(branch, above) for branch in branches]
        if word == "oneOf":
            kinds = [{kind for kind, _ in values} for values in found]
            if sum(map(len, kinds)) != len(set().union(*kinds)):
                raise self._fault(
                    "`oneOf` with two parts of one type is not supported; use `anyOf`"
                )
        return [value for values in found for value in values]

    def _listed(self, values: Sequence[Any]) -> list[tuple[str, str]]:
        texts = [value for value in values if isinstance(value, str) and value]
        found = [("string", choice(texts, self._param))] if texts else []
        if "" in values:
            found.append(("string", ""))
        for kind in ALL[1:]:
            same = [value for value in values if _kind(value) == kind]
            if same:
                found.append((kind, self._sheet.json({"enum": same}, TIGHT)))
        return found

    def _typed(self, kind: str, schema: Schema) -> tuple[str, str]:
        if kind not in TYPES:
            raise self._fault(f"the type {str(kind)[:40]!r} is not known")
        if kind == "string":
            return "string", self._text(schema)
        shared = {w: self._root[w] for w in ("$defs", "definitions") if w in self._root}
        _demand_local(schema, self._param)
        return TYPES[kind], self._sheet.json({**schema, "type": kind, **shared}, TIGHT)

    def _text(self, schema: Schema) -> str:
        """A raw string: everything up to the close tag."""
        bounds = schema.get("minLength", 0), schema.get("maxLength", "")
        parts = []
        if bounds != (0, ""):
            parts.append(f"/(?s:.){{{bounds[0]},{bounds[1]}}}/")
        if "pattern" in schema:
            parts.append(self._pattern(str(schema["pattern"])))
        if "format" in schema:
            if schema["format"] not in FORMATS:
                raise self._fault(f"the format {str(schema['format'])[:40]!r} is not supported")
            parts.append(expression(FORMATS[schema["format"]], self._param))
        if not parts:
            return self._sheet.any_string
        return self._sheet.terminal(" & ".join(parts))

    def _pattern(self, pattern: str) -> str:
        """JSON schema looks for a pattern anywhere; here it must match the whole."""
        starts, ends = pattern.startswith("^"), bool(re.search(r"(?<!\\)(?:\\\\)*\$$", pattern))
        try:
            re.compile(pattern)
        except re.error as error:
            raise self._fault(f"the pattern {pattern[:60]!r} is not one: {error}") from None
        inner = pattern[starts : len(pattern) - ends]
        if (starts or ends) and _has_top_bar(inner):
            raise self._fault(f"the pattern {pattern[:60]!r} binds ^ or $ to one side of |")
        before, after = ("" if starts else "(?s:.)*"), ("" if ends else "(?s:.)*")
        return expression(f"{before}(?:{inner}){after}", self._param)

    def _fault(self, what: str) -> InvalidRequest:
        return InvalidRequest(f"`{self._param}` cannot be enforced: {what}", param=self._param)


def _demand_local(schema: Any, param: str) -> None:
    """Refuse references that lose their place when a part of the schema stands alone."""
    if isinstance(schema, Mapping):
        ref = schema.get("$ref")
        if isinstance(ref, str) and not re.match(r"#/(\$defs|definitions)/", ref):
            raise InvalidRequest(
                f"`{param}` cannot be enforced: the $ref {ref[:80]!r} must lead into `$defs`",
                param=param,
            )
        schema = list(schema.values())
    if isinstance(schema, list):
        for child in schema:
            _demand_local(child, param)


def _has_top_bar(pattern: str) -> bool:
    depth, at, in_set = 0, 0, False
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
        elif in_set:
            in_set = char != "]"
        elif char == "[":
            in_set = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and not depth:
            return True
        at += 1
    return False


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, int | float):
        return "number"
    return "object" if isinstance(value, Mapping) else "array" if isinstance(value, list) else ""
