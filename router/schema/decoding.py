"""Bytes of a request body to a typed value, or an `InvalidRequest` that names the field.

Knows how msgspec words its refusals and how a client wants to read them. The first fault ends the
reading, so that a body with thousands of faults costs no more than a body with one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from common.errors import InvalidRequest

T = TypeVar("T", bound=msgspec.Struct)

# Words of fields that allow only some.
CHOICES = {
    re.compile(r"messages\[\d+\]\.role$"): "system, developer, user, assistant or tool",
    re.compile(r"\.content\[\d+\]\.type$"): "text, or image_url where images may stand",
    re.compile(r"^response_format\.type$"): "text, json_object or json_schema",
    re.compile(r"^thinking\.type$"): "enabled or disabled",
    re.compile(r"(tools|tool_calls)\[\d+\]\.type$"): "function",
}

LONGEST_VALUE = 60  # characters of an offending value repeated in a message

_PATH = re.compile(r"(.*?) - at `(?:key in )?\$(.*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_EXTRA = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_CHOICE = re.compile(r"Invalid (?:enum )?value '?(.*?)'?$", re.DOTALL)
_TYPES = re.compile(r"`([a-z| ]+)`")
_TYPE_NAMES = {
    "bool": "a boolean",
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
_HIGH = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_LOW = re.compile(rb"(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}")


def decode_object(body: bytes) -> dict[str, Any]:
    """Parse a body that must be one JSON object. Integers keep every digit.

    Raises:
        InvalidRequest: empty, not JSON (NaN and Infinity are not), not an object, nested too
            deeply, or text with half a surrogate pair; the message gives the byte's position.
    """
    if not body.strip():
        raise InvalidRequest("the request body is empty; send a JSON object")
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise InvalidRequest("the request body is nested too deeply") from None
    except msgspec.ValidationError as error:
        number = (
            "holds a number that is out of range"
            if "range" in str(error)
            else f"is not valid: {error}"
        )
        raise InvalidRequest(f"the request body {number}") from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(_why_not_json(body, error)) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the request body must be a JSON object, not {_kind(value)}")
    return value


def _why_not_json(body: bytes, error: Exception) -> str:
    for pattern in (_HIGH, _LOW):
        if match := pattern.search(body):
            return (
                f"the request body holds half a surrogate pair at byte {match.start()}; "
                "send whole characters"
            )
    text = str(error).removeprefix("JSON is malformed: ")
    return f"the request body is not JSON: {text[0].lower()}{text[1:]}"


def convert_object(
    raw: dict[str, Any], kind: type[T], choices: Mapping[re.Pattern[str], str] = CHOICES
) -> T:
    """Read a parsed object as `kind`; fields that `kind` lacks are passed over.

    `choices` tells, by the end of a field's path, the words it allows.

    Raises:
        InvalidRequest: the first fault, with the field's path as `param`.
    """
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise _refusal(raw, kind, str(error), choices) from None
    except RecursionError:
        raise InvalidRequest("the request body is nested too deeply") from None


def unknown_fields(raw: dict[str, Any], kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Names of `raw` that `kind` does not have, in the body's order."""
    known = frozenset(kind.__struct_encode_fields__)
    return tuple(name for name in raw if name not in known)


def _refusal(
    raw: dict[str, Any],
    kind: type[msgspec.Struct],
    text: str,
    choices: Mapping[re.Pattern[str], str],
) -> InvalidRequest:
    match = _PATH.match(text)
    what, path = (match[1], match[2].removeprefix(".")) if match else (text, "")
    param = path.split("[...]")[0]
    if missing := _MISSING.match(what):
        param = f"{param}.{missing[1]}" if param else missing[1]
        return InvalidRequest(f"`{param}` is required", param=param)
    value = _show(_at(raw, param)) if "[...]" not in path else None
    given = f" is {value}" if value is not None else ""
    if bounds := _bounds(kind, param):
        return InvalidRequest(f"`{param}`{given}; it must be {bounds}", param=param)
    if choice := _CHOICE.match(what):
        known = next((words for end, words in choices.items() if end.search(param)), "")
        rule = f"; it must be {known}" if known else ", which is not known"
        return InvalidRequest(f"`{param}` is {_show(choice[1])}{rule}", param=param or None)
    if extra := _EXTRA.match(what):
        return InvalidRequest(f"`{param}` holds an unknown field, `{extra[1][:60]}`", param=param)
    if "[...]" in path:
        given = " holds a wrong value"
    rule = _TYPES.sub(lambda match: _type(match[1]), what)
    rule = rule.replace("Expected ", "it must be ").replace(", got ", ", not ")
    return InvalidRequest(f"`{param}`{given}; {rule}" if param else rule, param=param or None)


def _type(names: str) -> str:
    """A type as a reader calls it; null is left out, since it means unset everywhere."""
    known = [_TYPE_NAMES.get(name, f"`{name}`") for name in names.split(" | ")]
    return " or ".join([name for name in known if name != "null"] or known)


def _bounds(kind: type[msgspec.Struct], param: str) -> str:
    """Type and range of a top-level number, in words; empty for anything else."""
    for field in msgspec.structs.fields(kind):
        if field.encode_name == param:
            return _words(msgspec.inspect.type_info(field.type))
    return ""


def _words(info: msgspec.inspect.Type) -> str:
    if isinstance(info, msgspec.inspect.UnionType):
        return next((words for part in info.types if (words := _words(part))), "")
    if not isinstance(info, msgspec.inspect.IntType | msgspec.inspect.FloatType):
        return ""
    name = "an integer" if isinstance(info, msgspec.inspect.IntType) else "a number"
    if info.ge is not None and info.le is not None:
        return f"{name} from {info.ge} to {info.le}"
    if info.gt is not None and info.le is not None:
        return f"{name} above {info.gt} and at most {info.le}"
    return f"{name} of at least {info.ge}" if info.ge is not None else name


def _at(raw: Any, path: str) -> Any:
    for step in re.findall(r"[^.\[\]]+", path):
        try:
            raw = raw[int(step)] if isinstance(raw, list) else raw[step]
        except (KeyError, IndexError, ValueError, TypeError):
            return None
    return raw


def _kind(value: Any) -> str:
    names = {
        str: "a string",
        list: "an array",
        dict: "an object",
        bool: "a boolean",
        type(None): "null",
    }
    return names.get(type(value), "a number")


def _show(value: Any) -> str:
    """A value short enough for a message; containers are named, not repeated."""
    if isinstance(value, list | dict):
        return _kind(value)
    try:
        text = msgspec.json.encode(value).decode()
    except (ValueError, TypeError, OverflowError):
        text = "a number out of range"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"
