"""Shelf: memory for a model's weights, and for every checkpoint name the place it goes to.

Building on the meta device gives names and shapes without memory, which is all that checking a
checkpoint needs. Knows nothing of files.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.weights.shares import Cut

Fill = Callable[[Tensor, Tensor], None]  # destination, source as in the checkpoint

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def copy(into: Tensor, source: Tensor) -> None:
    """Copy a source of the same number of elements, converting its dtype."""
    into.copy_(source.view(into.shape))


def multiply(into: Tensor, source: Tensor) -> None:
    """Multiply a flat source in; the destination started from ones."""
    into.mul_(source.flatten().to(into.device, into.dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one tensor, or one tensor of every expert, goes."""

    dest: Tensor  # what is filled; with a leading expert axis where `experts` is positive
    shapes: tuple[tuple[int, ...], ...]  # the shapes it may have in the checkpoint
    kind: str  # "model", "float" (the model's dtype or fp32), "u8"
    fill: Fill = copy
    experts: int = 0  # in the checkpoint
    cut: Cut | None = None  # the part that is read; None: all
    owned: tuple[int, ...] = ()  # experts by their row of `dest`; those of other ranks are not read


@dataclass(slots=True)
class Shelf:
    """Allocates weights and remembers their places by checkpoint name.

    In names of routed experts the number is written `*`.
    """

    dtype: torch.dtype
    device: torch.device
    is_padded: bool = False  # a rank's cuts may be shorter than their memory: start from zeros
    places: dict[str, Place] = field(default_factory=dict)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory that the checkpoint will fill, completely unless the shelf is padded."""
        make = torch.zeros if self.is_padded else torch.empty
        return make(shape, dtype=dtype or self.dtype, device=self.device)

    def put(
        self,
        name: str,
        dest: Tensor,
        *,
        shapes: tuple[tuple[int, ...], ...] | None = None,
        kind: str = "model",
        fill: Fill = copy,
        experts: int = 0,
        cut: Cut | None = None,
        owned: tuple[int, ...] = (),
    ) -> Tensor:
        """Say that `name` goes to `dest`.

        Without `shapes` it has the shape of `dest` in the checkpoint, along `cut` that of the
        whole. A cut shorter than `dest` fills its beginning.
        """
        own = list(dest.shape[1:] if experts else dest.shape)
        inside = dest
        if cut is not None and shapes is None:
            own[cut.dim] = cut.total
            inside = dest.narrow(cut.dim + bool(experts), 0, cut.stop - cut.start)
        self.places[name] = Place(
            dest=inside,
            shapes=shapes or (tuple(own),),
            kind=kind,
            fill=fill,
            experts=experts,
            cut=cut,
            owned=owned,
        )
        return dest

    def new(
        self, name: str, *shape: int, dtype: torch.dtype | None = None, cut: Cut | None = None
    ) -> Tensor:
        """Allocate a tensor of its own for `name`."""
        kind = "float" if dtype is not None else "model"
        return self.put(name, self.empty(*shape, dtype=dtype), kind=kind, cut=cut)


def star(name: str) -> tuple[str, int]:
    """A name with its expert number written `*`, and that number; 0 where there is none."""
    match = _EXPERT.search(name)
    if match is None:
        return name, 0
    return f"{name[: match.start(1)]}*{name[match.end(1) :]}", int(match[1])
