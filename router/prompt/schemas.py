"""What a JSON schema may say if an answer shall be held to it; everything else is refused by name.

Keywords without force (titles, defaults, unknown ones) are passed over, as the standard has it. A
keyword that has force and cannot be enforced is an error: half a schema would be no promise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from common.errors import InvalidRequest

Schema = Mapping[str, Any]

UNENFORCED = frozenset(
    {
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "maxContains",
        "uniqueItems",
        "propertyNames",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "unevaluatedProperties",
        "unevaluatedItems",
        "additionalItems",
        "$dynamicRef",
        "$recursiveRef",
    }
)
NAMED = ("properties", "patternProperties", "$defs", "definitions")  # schemas by name
LISTED = ("anyOf", "allOf", "oneOf", "prefixItems")
SINGLE = ("items", "additionalProperties")
WIDEST = 2**63  # integers beyond lose digits on their way through the library
DEEPEST = 200


def check_schema(schema: Schema, param: str) -> None:
    """Refuse a schema that could not be enforced to the letter.

    Raises:
        InvalidRequest: the keyword, reference or number at fault, with the place where it stands.
    """
    for path, node in _walk(schema, "#", 0):
        for word in node:
            if word in UNENFORCED and not _is_idle(word, node[word]):
                _refuse(param, f"the keyword `{word}` at {path} is not supported")
        _check_shapes(node, path, param)
        if isinstance(node.get("items"), list):
            _refuse(param, f"`items` at {path} is a list; use `prefixItems`")
        for word in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
            if isinstance(node.get(word), bool):
                _refuse(param, f"`{word}` at {path} must be a number")
        if _has_long_number([node.get(w) for w in ("enum", "const", "minimum", "maximum")]):
            _refuse(param, f"a number at {path} has more than 64 bits")
        _follow(schema, node, path, param)


def _check_shapes(node: Schema, path: str, param: str) -> None:
    required = node.get("required", [])
    if not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
        _refuse(param, f"`required` at {path} must be a list of names")
    for word in NAMED:
        if not isinstance(node.get(word, {}), Mapping):
            _refuse(param, f"`{word}` at {path} must be an object")
    for word in LISTED:
        if not isinstance(node.get(word, []), list):
            _refuse(param, f"`{word}` at {path} must be a list")


def resolve(root: Schema, node: Any, param: str) -> Any:
    """What `node` stands for: it, or what its reference leads to.

    Raises:
        InvalidRequest: a reference leads out of the schema, to nothing, or only to itself.
    """
    seen: list[str] = []
    while isinstance(node, Mapping) and isinstance(ref := node.get("$ref"), str):
        if ref in seen:
            _refuse(param, f"the $ref {_short(ref)} leads only to itself")
        seen.append(ref)
        node = target(root, ref, param)
    return node


def _follow(root: Schema, node: Schema, path: str, param: str) -> None:
    ref = node.get("$ref")
    if ref is not None and not isinstance(ref, str):
        _refuse(param, f"the $ref at {path} is not a string")
    if ref is not None:
        resolve(root, node, param)


def target(root: Schema, ref: str, param: str) -> Any:
    """What a reference leads to.

    Raises:
        InvalidRequest: it leads out of the schema, or to nothing.
    """
    if not ref.startswith("#"):
        _refuse(param, f"the $ref {_short(ref)} leads outside; nothing is fetched, write it inside")
    found: Any = root
    for step in ref.removeprefix("#").removeprefix("/").split("/") if ref != "#" else ():
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isdigit() and int(step) < len(found):
            found = found[int(step)]
        elif isinstance(found, Mapping) and step in found:
            found = found[step]
        else:
            _refuse(param, f"the $ref {_short(ref)} leads to nothing")
    return found


def _walk(node: Any, path: str, depth: int) -> Iterator[tuple[str, Schema]]:
    if not isinstance(node, Mapping):
        return
    if depth > DEEPEST:
        raise InvalidRequest("the schema is nested too deeply")
    yield path, node
    for word in NAMED:
        if isinstance(inner := node.get(word), Mapping):
            for name, child in inner.items():
                yield from _walk(child, f"{path}/{word}/{name}", depth + 1)
    for word in LISTED:
        if isinstance(inner := node.get(word), list):
            for index, child in enumerate(inner):
                yield from _walk(child, f"{path}/{word}/{index}", depth + 1)
    for word in SINGLE:
        yield from _walk(node.get(word), f"{path}/{word}", depth + 1)


def _is_idle(word: str, value: Any) -> bool:
    """Whether an unsupported keyword says nothing."""
    if word == "uniqueItems":
        return value is False
    return word.startswith("dependen") and value == {}


def _has_long_number(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_has_long_number, value))
    if isinstance(value, Mapping):
        return any(map(_has_long_number, value.values()))
    return isinstance(value, int) and not -WIDEST <= value < WIDEST


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}…")


def _refuse(param: str, what: str) -> None:
    raise InvalidRequest(f"`{param}` cannot be enforced: {what}", param=param)
