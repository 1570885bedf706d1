"""TextMemory: the two pools of a text room, who holds what of them, and their registration."""

from __future__ import annotations

import torch

from common.cache.allocator import Allocator
from common.cache.kda_pool import StatePool
from common.cache.mla_pool import LatentPool
from common.config.spec import TextSpec
from common.contract.regions import PoolInfo
from common.model.batch import Memory
from common.transfer.link import Link


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
    ) -> None:
        """Allocate both pools."""
        self.states = StatePool(spec, slots, dtype=dtype, device=device)
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
