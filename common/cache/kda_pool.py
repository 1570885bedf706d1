"""StatePool: the KDA memory of all requests, slot-major, one contiguous span a slot.

A slot carries a header (whose it is, how many tokens it absorbed) which the step that writes the
state advances; publishing refuses when the header disagrees. Which slot is free is the
allocator's business.
"""

from __future__ import annotations

import torch

from common.cache.layout import STATE_DTYPE, conv_shape, facts, size_of, state_shape
from common.config.checkpoint import TextSpec
from common.contract.regions import Span
from common.errors import HandoffRefused
from common.ops.digest import Rows, Signature, Summing


class StatePool:
    """Recurrent and convolution state of `slots` requests.

    `state` is fp32 [slots, kda_layers, heads, V, K], `conv` is
    [slots, kda_layers, heads, taps - 1, 3, head_dim] in the model's dtype. All offsets are 64-bit:
    a slot of K3 is 108 M elements.
    """

    def __init__(
        self,
        spec: TextSpec,
        slots: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        first_head: int = 0,
    ) -> None:
        """Allocate zeroed memory for `slots` requests.

        Under tensor parallelism `spec` has one rank's heads, the first of them `first_head` of the
        whole model: digests are those of its part of the whole layer.
        """
        self.layers, self.first_head = spec.kda_layers, first_head
        self.slots = slots
        self.state = torch.zeros((slots, *state_shape(spec)), dtype=STATE_DTYPE, device=device)
        self.conv = torch.zeros((slots, *conv_shape(spec)), dtype=dtype, device=device)
        self.state_bytes = size_of(state_shape(spec), STATE_DTYPE)
        self.conv_bytes = size_of(conv_shape(spec), dtype)
        self._names = {
            (kind, prefix): tuple(f"{prefix}{kind}:{layer}" for layer in self.layers)
            for kind in ("state", "conv")
            for prefix in ("", "canary_")
        }
        self._headers: list[tuple[bytes, int]] = [(b"", 0)] * slots
        self._layout = {
            "state": facts(state_shape(spec), STATE_DTYPE, layers=spec.kda_layers),
            "conv": facts(conv_shape(spec), dtype, layers=spec.kda_layers),
        }

    def layout(self) -> dict[str, object]:
        """This pool's share of the layout print."""
        return dict(self._layout)

    def begin(self, slot: int, nonce: bytes, *, tokens: int = 0, zero: bool = True) -> None:
        """Make the slot `nonce`'s, with `tokens` absorbed.

        Args:
            slot: a slot its caller holds.
            nonce: names the request inside this process.
            tokens: tokens the memory already stands for (a restored snapshot, a finished READ).
            zero: clear the memory; False when it was or will be filled by a copy or a READ.
        """
        if zero:
            self.state[slot].zero_()
            self.conv[slot].zero_()
        self._headers[slot] = (nonce, tokens)

    def advance(self, slot: int, nonce: bytes, tokens: int) -> int:
        """Note that the step just made absorbed `tokens` more; returns the new count.

        Raises:
            HandoffRefused: the slot is not `nonce`'s.
        """
        absorbed = self._absorbed(slot, nonce)
        self._headers[slot] = (nonce, absorbed + tokens)
        return absorbed + tokens

    def expect(self, slot: int, nonce: bytes, tokens: int) -> None:
        """Refuse to publish unless the slot is `nonce`'s and absorbed exactly `tokens`.

        Raises:
            HandoffRefused: part "nonce" or "token_count".
        """
        absorbed = self._absorbed(slot, nonce)
        if absorbed != tokens:
            raise HandoffRefused(
                "token_count", f"slot {slot} absorbed {absorbed} tokens, not {tokens}"
            )

    def header(self, slot: int) -> tuple[bytes, int]:
        """Whose the slot is, and how many tokens it absorbed."""
        return self._headers[slot]

    def copy(self, src: int, dst: int) -> None:
        """Copy one slot, header included."""
        self.state[dst].copy_(self.state[src])
        self.conv[dst].copy_(self.conv[src])
        self._headers[dst] = self._headers[src]

    def span(self, slot: int) -> dict[str, Span]:
        """Where the slot lies: {"state": Span, "conv": Span}, one span each."""
        return {
            "state": Span(pool="state", offset=slot * self.state_bytes, size=self.state_bytes),
            "conv": Span(pool="conv", offset=slot * self.conv_bytes, size=self.conv_bytes),
        }

    def sign(self, slot: int, *, prefix: str = "") -> Signature:
        """Digest the slot as it is now: "<prefix>state:<layer>" and "<prefix>conv:<layer>"."""
        kinds, count = ("state", "conv"), len(self.layers)
        names = [name for kind in kinds for name in self.names(kind, prefix)]
        summing = Summing(names, self.state.device)
        rows = [self.rows(kind, slot, 0, count, at * count) for at, kind in enumerate(kinds)]
        summing.add([row for some in rows for row in some])
        return summing.signature()

    def names(self, kind: str, prefix: str = "") -> tuple[str, ...]:
        """What the digests of a kind are called, by layer."""
        return self._names[kind, prefix]

    def rows(self, kind: str, slot: int, low: int, high: int, at: int) -> list[Rows]:
        """The slot's layers from number `low` to before `high`, to be digested.

        Args:
            kind: "state" or "conv".
            slot: whose.
            low: number of the first layer, counted among the KDA layers.
            high: number behind the last.
            at: where layer 0 stands among the names.
        """
        values = (self.state if kind == "state" else self.conv)[slot, low:high]
        first = self.first_head * values.shape[2:].numel() * values.element_size() // 4
        return [Rows(values=values[None], at=at + low, first=first)]

    def _absorbed(self, slot: int, nonce: bytes) -> int:
        owner, absorbed = self._headers[slot]
        if owner != nonce:
            raise HandoffRefused(
                "nonce", f"slot {slot} belongs to {owner.hex() or 'nobody'}, not to {nonce.hex()}"
            )
        return absorbed
