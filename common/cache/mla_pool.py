"""LatentPool: MLA latents of all requests, page-major: one page holds 64 tokens of every MLA layer.

A page's digest is taken when the page is filled and kept with it. A prefix hit adds stored
digests and never signs memory again, so what happened to a page since it was made shows. Which
page is free is the allocator's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from common.cache.layout import PAGE_TOKENS, facts, latent_shape, size_of
from common.config.checkpoint import TextSpec
from common.contract.regions import Span
from common.ops.digest import Rows, Signature, Summing, digest_listed, on_device


def pages_of(num_tokens: int) -> int:
    """Pages that `num_tokens` tokens need."""
    return -(-num_tokens // PAGE_TOKENS)


class LatentPool:
    """`pages` is [pages, mla_layers, 64, latent_width] in the model's dtype; offsets are 64-bit."""

    def __init__(
        self, spec: TextSpec, pages: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Allocate zeroed memory for `pages` pages."""
        shape = latent_shape(spec)
        self.layers = spec.mla_layers
        self.names = tuple(f"latent:{layer}" for layer in self.layers)  # of the digests
        self.pages = torch.zeros((pages, *shape), dtype=dtype, device=device)
        self.page_bytes = size_of(shape, dtype)
        self.page_words = (
            self.page_bytes // len(self.layers) // 4 if self.layers else 0
        )  # of one layer
        self._sums = torch.zeros((pages, len(self.layers)), dtype=torch.int64, device=device)
        self._finite = torch.ones((pages, len(self.layers)), dtype=torch.bool, device=device)
        self._signed_as: list[int | None] = [None] * pages  # position of the page in its request
        self._layout = {"latent": facts(shape, dtype, layers=spec.mla_layers)}

    def layout(self) -> dict[str, object]:
        """This pool's share of the layout print."""
        return dict(self._layout)

    def spans(self, pages: Sequence[int]) -> tuple[Span, ...]:
        """Where a request's pages lie, in order; neighbours in memory are merged."""
        starts = [at for at, page in enumerate(pages) if not at or pages[at - 1] + 1 != page]
        size = self.page_bytes
        return tuple(
            Span(pool="latent", offset=pages[start] * size, size=(end - start) * size)
            for start, end in pairwise([*starts, len(pages)])
        )

    def open(self, pages: Sequence[int]) -> None:
        """Forget the digests kept with these pages: a new owner will fill them anew."""
        for page in pages:
            self._signed_as[page] = None

    def sign(self, pages: Sequence[int], first: int) -> None:
        """Take and keep the digests of pages that were just filled.

        Args:
            pages: page numbers, all full, following each other in their request.
            first: position of pages[0] among the request's pages.
        """
        if not pages:
            return
        sums, finite = digest_listed(self.pages, pages, PAGE_TOKENS, first * self.page_words)
        index = on_device(pages, self.pages.device)
        self._sums[index], self._finite[index] = sums, finite
        for position, page in enumerate(pages, start=first):
            self._signed_as[page] = position

    def signed(self, pages: Sequence[int], num_tokens: int) -> Signature:
        """The request's digests: kept ones for full pages, the last partial page measured now.

        Args:
            pages: all pages of the request in order.
            num_tokens: tokens the request has; only these are covered.

        Raises:
            ValueError: a full page was never signed, or was signed at another position.
        """
        summing = Summing(self.names, self.pages.device)
        self.add_kept(pages, num_tokens, summing, 0)
        full = num_tokens // PAGE_TOKENS
        summing.add(self.rows(pages, num_tokens, 0, full, full + 1))
        return summing.signature()

    def add_kept(self, pages: Sequence[int], num_tokens: int, summing: Summing, at: int) -> None:
        """Add the digests kept with the full pages; errors as of `signed`.

        Args:
            pages: all pages of the request in order.
            num_tokens: tokens the request has.
            summing: where to.
            at: where the first layer stands among its names.
        """
        full = num_tokens // PAGE_TOKENS
        for position in range(full):
            if self._signed_as[pages[position]] != position:
                raise ValueError(
                    f"page {pages[position]} is not signed as page {position} of its request"
                )
        index = on_device(pages[:full], self.pages.device)
        summing.add_known(at, self._sums[index].sum(0), self._finite[index].all(0))

    def measure(self, pages: Sequence[int], num_tokens: int) -> Signature:
        """The request's digests over memory as it is now: what a receiver compares."""
        summing = Summing(self.names, self.pages.device)
        summing.add(self.rows(pages, num_tokens, 0, 0, len(pages)))
        return summing.signature()

    def rows(
        self, pages: Sequence[int], num_tokens: int, at: int, low: int, high: int
    ) -> list[Rows]:
        """A request's pages from position `low` to before `high`, to be digested.

        Args:
            pages: all pages of the request in order.
            num_tokens: tokens the request has; only these are covered.
            at: where the first layer stands among the names.
            low: position of the first page.
            high: position behind the last.
        """
        full, rest = divmod(num_tokens, PAGE_TOKENS)
        cuts = [(pages[low : min(high, full)], low, PAGE_TOKENS)]
        if low <= full < high and rest:
            cuts.append((pages[full : full + 1], full, rest))
        return [
            Rows(values=self.pages, at=at, first=first * self.page_words, pages=some, tokens=tokens)
            for some, first, tokens in cuts
            if some
        ]

    def zero_rest(self, pages: Sequence[int], num_tokens: int) -> None:
        """Clear what lies behind the request's last token on its last page."""
        full, rest = divmod(num_tokens, PAGE_TOKENS)
        if rest:
            self.pages[pages[full], :, rest:].zero_()

    def copy(self, src: int, dst: int) -> None:
        """Copy one page with the digest kept with it."""
        self.pages[dst].copy_(self.pages[src])
        self._sums[dst], self._finite[dst] = self._sums[src], self._finite[src]
        self._signed_as[dst] = self._signed_as[src]
