"""Match what a checkpoint holds with the places of a shelf; refuse gaps, leftovers and misfits.

A matrix may be stored plain, as FP8 with `_scale_inv`, and an expert's also as MXFP4 `_packed`
with `_scale`. Knows names, shapes and dtypes; reads no tensor.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from common.config.spec import ModelSpec
from common.errors import CheckpointError
from common.weights.index import Stored
from common.weights.shelf import Place, star

VISION = ("vision_tower.", "mm_projector.")
FLOATS = {"bfloat16": "BF16", "float32": "F32", "float16": "F16"}
FP8 = "F8_E4M3"
_LAYER = re.compile(r"(?:^|\.)model\.layers\.(\d+)\.")
_SHOWN = 8  # names listed in one error


@dataclass(frozen=True, slots=True)
class Match:
    """One place with what fills it: the tensor, and its scale where it is quantised."""

    place: Place
    expert: int
    main: Stored
    scale: Stored | None


@dataclass(slots=True)
class Matcher:
    """Feeds on stored tensors one by one, returns matches as they are complete, then judges."""

    places: Mapping[str, Place]
    spec: ModelSpec
    vision: bool  # the places are the vision tower's
    done: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    waiting: dict[str, Stored] = field(default_factory=dict)
    surplus: list[str] = field(default_factory=list)

    def run(self, tensors: Iterable[Stored]) -> Iterator[Match]:
        """Match everything; errors as of `feed` and `finish`."""
        for tensor in tensors:
            match = self.feed(tensor)
            if match is not None:
                yield match
        self.finish()

    def feed(self, tensor: Stored) -> Match | None:
        """Take one tensor; a match where it completes one.

        Raises:
            CheckpointError: its shape or dtype is wrong, or it is there in two formats.
        """
        name, expert = star(tensor.name)
        plain, part = _plain(name)
        place = self.places.get(name)
        if place is not None:
            plain, part = name, ""
        else:
            place = self.places.get(plain)
        if place is None or expert >= max(1, place.experts):
            if not self._is_foreign(tensor.name):
                self.surplus.append(tensor.name)
            return None
        return self._fit(tensor, place, plain, part, expert)

    def finish(self) -> None:
        """Judge after the last tensor.

        Raises:
            CheckpointError: tensors are missing or too many; they are named.
        """
        if self.surplus:
            raise CheckpointError(
                f"the checkpoint has tensors the model lacks: {_some(self.surplus)}"
            )
        self._refuse_gaps()

    def _fit(
        self, tensor: Stored, place: Place, plain: str, part: str, expert: int
    ) -> Match | None:
        if part == "" and tensor.dtype != FP8:
            self._check(tensor, place.shapes, self._floats(place.kind))
            self._finish(tensor, plain, expert)
            return Match(place, expert, tensor, None)
        shape = place.shapes[0]
        if part in ("_packed", "_scale"):
            if place.experts == 0 or place.kind != "model":
                raise CheckpointError(f"{tensor.name} is packed; only routed experts may be")
            each = 2 if part == "_packed" else 32
            self._check(tensor, ((*shape[:-1], shape[-1] // each),), ("U8",))
        elif part == "_scale_inv":
            self._check(tensor, (tuple(-(-n // 128) for n in shape),), ("F32",))
        else:
            self._check(tensor, place.shapes, (FP8,))
        key = f"{plain}/{expert}/{'fp8' if part in ('', '_scale_inv') else 'mxfp4'}"
        other = self.waiting.pop(key, None)
        if other is None:
            self.waiting[key] = tensor
            return None
        main, scale = (other, tensor) if part in ("_scale", "_scale_inv") else (tensor, other)
        self._finish(tensor, plain, expert)
        return Match(place, expert, main, scale)

    def _finish(self, tensor: Stored, plain: str, expert: int) -> None:
        if expert in self.done[plain]:
            raise CheckpointError(f"{tensor.name} is there a second time in another format")
        self.done[plain].add(expert)

    def _check(
        self, tensor: Stored, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...]
    ) -> None:
        if tensor.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise CheckpointError(f"{tensor.name} has shape {list(tensor.shape)}, not {wanted}")
        if tensor.dtype not in dtypes:
            raise CheckpointError(
                f"{tensor.name} has dtype {tensor.dtype}, not {' or '.join(dtypes)}"
            )

    def _floats(self, kind: str) -> tuple[str, ...]:
        own = FLOATS.get(self.spec.text.dtype, "BF16")
        return {"model": (own,), "float": ("F32", own), "u8": ("U8",)}[kind]

    def _is_foreign(self, name: str) -> bool:
        """Another room's tensor, or one of a tail of layers that the config cut off."""
        if name.startswith(VISION):
            return not self.vision and self.spec.vision is not None
        if self.vision:
            return True
        layer = _LAYER.search(name)
        text = self.spec.text
        return layer is not None and text.num_layers <= int(layer[1]) < text.listed_layers

    def _refuse_gaps(self) -> None:
        halves = [tensor.name for tensor in self.waiting.values()]
        if halves:
            raise CheckpointError(f"the other half is missing of: {_some(halves)}")
        gaps: list[str] = []
        for name, place in self.places.items():
            count = max(1, place.experts)
            if len(self.done[name]) < count:
                missing = (i for i in range(count) if i not in self.done[name])
                gaps.extend(name.replace("*", str(i)) for i in missing)
        if gaps:
            raise CheckpointError(f"the checkpoint lacks {len(gaps)} tensors: {_some(gaps)}")


def _plain(name: str) -> tuple[str, str]:
    """The weight a quantised part belongs to, and the part's suffix."""
    for suffix in ("_packed", "_scale_inv", "_scale"):
        if name.endswith(f".weight{suffix}"):
            return name.removesuffix(suffix), suffix
    return name, ""


def _some(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
