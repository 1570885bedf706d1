"""TextMemory: the two pools of a text room, who holds what of them, and their registration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from common.cache.allocator import Allocator
from common.cache.kda_pool import StatePool
from common.cache.layout import PAGE_TOKENS
from common.cache.mla_pool import LatentPool
from common.config.spec import TextSpec
from common.contract.regions import PoolInfo
from common.model.batch import Memory
from common.ops.digest import Rows, Signature, Summing
from common.runtime.place import Place, Stretch, stretches_of
from common.transfer.link import Link

Mirror = Callable[..., None]  # what, and its numbers


class TextMemory:
    """State slots and latent pages with their allocators."""

    def __init__(
        self,
        spec: TextSpec,
        *,
        slots: int,
        pages: int,
        dtype: torch.dtype,
        device: torch.device | str,
        first_head: int = 0,
        mirror: Mirror | None = None,
        lane: int = 0,
    ) -> None:
        """Allocate both pools.

        Args:
            spec: as this rank sees the model.
            slots: requests.
            pages: of 64 tokens.
            dtype: of latents and convolution rows.
            device: of both.
            first_head: of the whole model, that this rank's heads start at.
            mirror: called before a change inside the pools, so that other ranks make it too.
            lane: of a group, whose memory this is; on the meta device it only keeps the books of
                memory that other ranks have.
        """
        self.lane, self.lanes = lane, [self]  # all lanes of the replica; a leader adds the others
        self._mirror, self._kept = mirror, dict[tuple[int, int], torch.Tensor]()
        self.states = StatePool(spec, slots, dtype=dtype, device=device, first_head=first_head)
        self.latents = LatentPool(spec, pages, dtype=dtype, device=device)
        self.slots, self.pages = Allocator(slots), Allocator(pages)
        self.tensors = Memory(
            state=self.states.state, conv=self.states.conv, latent=self.latents.pages
        )

    def register(self, link: Link) -> tuple[PoolInfo, ...]:
        """Register each pool once."""
        return (
            link.register("state", self.states.state),
            link.register("conv", self.states.conv),
            link.register("latent", self.latents.pages),
        )

    def stretches(self, place: Place) -> list[Stretch]:
        """A request's memory, kind by kind."""
        return stretches_of(self.states, self.latents, place)

    def summing(self, stretches: Sequence[Stretch]) -> Summing:
        """Digests of these kinds, in order, with nothing added."""
        names = [name for stretch in stretches for name in stretch.names]
        return Summing(names, self.latents.pages.device)

    def measure(self, place: Place) -> Signature:
        """A request's digests over memory as it is now."""
        stretches = self.stretches(place)
        return _summed(self.summing(stretches), stretches, {})

    def signed(self, place: Place) -> Signature:
        """The same, of full pages the digests that were kept when they were filled.

        Raises:
            ValueError: a full page was never signed, or was signed at another position.
        """
        stretches, at = self.stretches(place), 0
        summing = self.summing(stretches)
        for stretch in stretches:
            if stretch.kind == "latent":
                self.latents.add_kept(place.pages, place.tokens, summing, at)
            at += len(stretch.names)
        return _summed(summing, stretches, {"latent": place.tokens // PAGE_TOKENS})

    def begin(self, slot: int, nonce: bytes) -> None:
        """Make a slot `nonce`'s, empty."""
        self._tell("clear_slot", slot)
        self.states.begin(slot, nonce)

    def clear_slot(self, slot: int) -> None:
        """Empty a slot; on ranks that keep no books."""
        self.states.begin(slot, b"")

    def sign_pages(self, first: int, *pages: int) -> None:
        """Take and keep the digests of pages just filled, pages[0] being the request's `first`."""
        if pages:
            self._tell("sign_pages", first, *pages)
        if not self.latents.pages.is_meta:
            self.latents.sign(pages, first)

    def copy_slot(self, src: int, dst: int) -> None:
        """Copy one slot, header included."""
        self._tell("copy_slot", src, dst)
        self.states.copy(src, dst)

    def copy_page(self, src: int, dst: int) -> None:
        """Copy one page with the digest kept with it."""
        self._tell("copy_page", src, dst)
        self.latents.copy(src, dst)

    def keep_row(self, page: int, row: int) -> None:
        """Set one token's latents aside: a pass will write them again."""
        self._tell("keep_row", page, row)
        self._kept[page, row] = self.latents.pages[page, :, row].clone()

    def restore_row(self, page: int, row: int) -> None:
        """Put the latents back that `keep_row` set aside."""
        self._tell("restore_row", page, row)
        self.latents.pages[page, :, row].copy_(self._kept.pop((page, row)))

    def _tell(self, what: str, *numbers: int) -> None:
        if self._mirror is not None:
            self._mirror(what, *numbers)


def _summed(summing: Summing, stretches: Sequence[Stretch], first: Mapping[str, int]) -> Signature:
    """Add every kind from its `first` unit on, in one launch, and wait for the sums."""
    at, rows = 0, list[Rows]()
    for stretch in stretches:
        rows += stretch.rows(first.get(stretch.kind, 0), stretch.count, at)
        at += len(stretch.names)
    summing.add(rows)
    return summing.signature()
