"""Documents packed into rows of equal length: what one training step reads.

Every document starts on the grid of 64 and ends with at least three empty rows, so that a short
convolution along a row never reaches into the document before.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from benchmarks.nano import scenes
from benchmarks.nano.documents import Document, to_document
from benchmarks.nano.scenes import Recipe
from benchmarks.nano.tasks import document
from common.config.spec import CHUNK
from router.prompt.tokenizer import Tokenizer, load_tokenizer

PATCH, SIDE = 14, 16  # pixels of a patch's side; most patches of a picture's side
SLOTS = SIDE * SIDE  # patches reserved for one picture
GAP = 3  # empty rows after a document: the taps of the convolution before the current one
MOST_IMAGES = 12  # of one document
PATIENCE = 8  # documents that may not fit before a batch counts as full


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Size of a batch."""

    rows: int = 16
    length: int = 2048
    images: int = 128


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step's input. -1 marks padding in `document` and "no picture" in `image_row`."""

    ids: Tensor  # int16 [B, L]
    target: Tensor  # int16 [B, L], the id that follows
    weight: Tensor  # float32 [B, L], 1 where the next id is to be learnt
    document: Tensor  # int16 [B, L]
    image_row: Tensor  # int32 [B, L], row of the features of all pictures
    patches: Tensor  # uint8 [I, SLOTS, 588], channel, row, column of each patch
    grid: Tensor  # int32 [I, 2], patches down and across

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        return Batch(**{k: v.to(device, non_blocking=True) for k, v in vars(self).items()})


def to_patches(image: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
    """A painted picture as uint8 [h * w, 588] and (h, w); no side longer than 224 pixels.

    Transparent pixels show a board of 8-pixel squares, grey and white, as the release's do.
    """
    if image.shape[2] == 4:
        y, x = np.ogrid[: image.shape[0], : image.shape[1]]
        board = np.where((y // 8 + x // 8) % 2, 180, 255)[..., None]
        alpha = image[..., 3:].astype(np.float32) / 255
        image = (alpha * image[..., :3] + (1 - alpha) * board).astype(np.uint8)
    height, width = image.shape[:2]
    h, w = (-(-side // (2 * PATCH)) * 2 for side in (height, width))
    whole = np.zeros((h * PATCH, w * PATCH, 3), np.uint8)
    whole[:height, :width] = image
    cut = whole.reshape(h, PATCH, w, PATCH, 3).transpose(0, 2, 4, 1, 3)
    return cut.reshape(h * w, -1), (h, w)


class Packer:
    """Draws documents from a seed and lays each into the first row that has room."""

    def __init__(self, tokenizer: Tokenizer, shape: Shape, seed: int) -> None:
        self._tokenizer, self._shape = tokenizer, shape
        self._rng = random.Random(seed)
        self._waiting: list[Document] = []

    def batch(self, progress: float) -> Batch:
        """The next batch of the curriculum at `progress` (0 to 1)."""
        page = _Page(self._shape, self._tokenizer.specials["[PAD]"])
        queue, self._waiting = self._waiting, []
        refused = 0
        while refused < PATIENCE:
            doc = queue.pop() if queue else self._draw(progress, page)
            if not page.could_hold(doc):
                continue
            if not page.add(doc):
                refused += 1
                self._waiting.append(doc)
        return page.batch()

    def _draw(self, progress: float, page: _Page) -> Document:
        full = page.images > self._shape.images - 4
        drawn = document(self._rng, progress, without_pictures=full)
        return to_document(self._tokenizer, drawn)


class _Page:
    """A batch while it fills."""

    def __init__(self, shape: Shape, pad: int) -> None:
        self.images = 0
        self._shape = shape
        self._used = [0] * shape.rows
        self._count = 0
        size = (shape.rows, shape.length)
        self._ids = np.full(size, pad, np.int16)
        self._target = np.zeros(size, np.int16)
        self._weight = np.zeros(size, np.float32)
        self._document = np.full(size, -1, np.int16)
        self._image_row = np.full(size, -1, np.int32)
        self._patches = np.zeros((shape.images, SLOTS, 3 * PATCH * PATCH), np.uint8)
        self._grid = np.full((shape.images, 2), 2, np.int32)

    def could_hold(self, doc: Document) -> bool:
        """Whether an empty batch would take the document."""
        return _room(doc) <= self._shape.length and len(doc.recipes) <= MOST_IMAGES

    def add(self, doc: Document) -> bool:
        """Lay a document into the first row with room; False when there is none."""
        room, length = _room(doc), self._shape.length
        row = next((r for r, used in enumerate(self._used) if used + room <= length), None)
        if row is None or self.images + len(doc.recipes) > self._shape.images:
            return False
        at = self._used[row]
        end = at + len(doc.ids)
        self._used[row] += room
        self._ids[row, at:end] = doc.ids
        self._target[row, at : end - 1] = doc.ids[1:]
        self._weight[row, at : end - 1] = doc.learnt[1:]
        self._document[row, at:end] = self._count
        self._count += 1
        for recipe, offset in zip(doc.recipes, doc.offsets, strict=True):
            self._picture(recipe, row, at + offset)
        return True

    def _picture(self, recipe: Recipe, row: int, at: int) -> None:
        cut, (h, w) = to_patches(scenes.pixels(recipe))
        tokens = h * w // 4
        first = self.images * (SLOTS // 4)
        self._patches[self.images, : h * w] = cut
        self._grid[self.images] = h, w
        self._image_row[row, at : at + tokens] = np.arange(first, first + tokens)
        self.images += 1

    def batch(self) -> Batch:
        fields = ("ids", "target", "weight", "document", "image_row", "patches", "grid")
        return Batch(**{name: torch.from_numpy(getattr(self, f"_{name}")) for name in fields})


def _room(doc: Document) -> int:
    return -(-(len(doc.ids) + GAP) // CHUNK) * CHUNK


class Batches(IterableDataset):
    """Batches without end, made by as many processes as the loader has workers."""

    def __init__(self, directory: Path, shape: Shape, seed: int, progress: Synchronized) -> None:
        self._directory, self._shape, self._seed = directory, shape, seed
        self._progress = progress  # read for every batch

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        seed = self._seed * 1000 + (0 if worker is None else worker.id)
        packer = Packer(load_tokenizer(self._directory), self._shape, seed)
        while True:
            yield packer.batch(self._progress.value)


def loader(batches: Batches, workers: int, *, pin: bool) -> DataLoader:
    """Batches one at a time, made ahead by `workers` processes."""
    return DataLoader(
        batches,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=pin,
    )
