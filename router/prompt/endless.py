"""Whether what a form asks for can ever end: a schema or a rule that requires itself cannot.

A thing ends when, in one of its ways, everything that this way needs ends. `endings` finds all that
do, in time linear in the size of the ways.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from common.errors import InvalidRequest
from router.prompt.schemas import LISTED, SINGLE, Schema, target

K = TypeVar("K", bound=Hashable)

_NESTED = {"object", "array"}


def endings(ways: Mapping[K, Sequence[Sequence[K]]]) -> set[K]:
    """The keys that end. A key without ways does not; a way without needs does."""
    waiting: dict[K, list[tuple[K, list[K]]]] = defaultdict(list)  # need -> key, needs left
    found: set[K] = set()
    fresh: list[K] = []
    for key, several in ways.items():
        for way in several:
            left = list(dict.fromkeys(way))
            if not left:
                fresh.append(key)
            for need in tuple(left):
                waiting[need].append((key, left))
    while fresh:
        key = fresh.pop()
        if key in found:
            continue
        found.add(key)
        for other, left in waiting[key]:
            left.pop()  # which one does not matter, only how many
            if not left:
                fresh.append(other)
    return found


def refuse_endless(schema: Schema, param: str) -> None:
    """Refuse a checked schema with a part that only something endless would satisfy.

    Raises:
        InvalidRequest: the place of such a part.
    """
    graph = _Graph(schema, param)
    found = endings(graph.ways)
    for place, key in graph.places:
        if key not in found:
            raise InvalidRequest(
                f"`{param}` cannot be enforced: what {place} asks for never ends, because it "
                "requires itself; make the inner one optional",
                param=param,
            )


class _Graph:
    """The ways of every schema that an answer may meet. A key is an object's id or a part of it."""

    def __init__(self, root: Schema, param: str) -> None:
        self._root, self._param = root, param
        self.ways: dict[Hashable, list[list[Hashable]]] = {}
        self.places: list[tuple[str, Hashable]] = []
        self._left: list[tuple[str, Schema]] = [("#", root)]
        while self._left:
            self._add(*self._left.pop())

    def _key(self, place: str, schema: Any) -> list[Hashable]:
        """What must end where this schema stands; nothing for true and false."""
        if not isinstance(schema, Mapping):
            return []
        self._left.append((place, schema))
        return [id(schema)]

    def _add(self, place: str, schema: Schema) -> None:
        key = id(schema)
        if key in self.ways:
            return
        self.places.append((place, key))
        needs: list[Hashable] = []
        if isinstance(ref := schema.get("$ref"), str):
            needs += self._key(ref, target(self._root, ref, self._param))
        for word in LISTED[:3]:
            branches = _list(schema.get(word))
            found = [self._key(f"{place}/{word}/{i}", b) for i, b in enumerate(branches)]
            if word == "allOf":
                needs += [need for one in found for need in one]
            elif found:
                self.ways[key, word] = list(found)
                needs.append((key, word))
        nested = self._nested(place, schema)
        if nested is not None:
            self.ways[key, "type"] = nested
            needs.append((key, "type"))
        self.ways[key] = [needs]

    def _nested(self, place: str, schema: Schema) -> list[list[Hashable]] | None:
        """The ways of an object and of an array; None where something simpler will do."""
        own = schema.get("properties")
        properties = own if isinstance(own, Mapping) else {}
        children = {
            name: self._key(f"{place}/properties/{name}", child)
            for name, child in properties.items()
        }
        single = {word: self._key(f"{place}/{word}", schema.get(word)) for word in SINGLE}
        first = [
            self._key(f"{place}/prefixItems/{i}", child)
            for i, child in enumerate(_list(schema.get("prefixItems")))
        ]
        kinds = schema.get("type")
        types = {kind for kind in _list(kinds, [kinds]) if isinstance(kind, str)}
        if not types or types - _NESTED or "enum" in schema or "const" in schema:
            return None
        ways: list[list[Hashable]] = []
        if "object" in types:
            ways.append(
                _joined(
                    children.get(str(name), single["additionalProperties"])
                    for name in _list(schema.get("required"))
                )
            )
        if "array" in types:
            least = schema.get("minItems")
            least = least if isinstance(least, int) else 0
            rest = [single["items"]] if least > len(first) else []
            ways.append(_joined([*first[:least], *rest]))
        return ways


def _joined(parts: Iterable[list[Hashable]]) -> list[Hashable]:
    return [key for part in parts for key in part]


def _list(value: Any, otherwise: list[Any] | None = None) -> list[Any]:
    """A list as it is: what the standard wants otherwise is refused when the form is compiled."""
    return value if isinstance(value, list) else otherwise or []
