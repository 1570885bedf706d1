"""What a sublayer reads and where its output goes: the two kinds of residual memory.

`Blocks` is K3's attention residual over blocks of layers; `Stream` the ordinary sum. Both live for
one forward pass. Formulas: docs/model.md.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from common.config.spec import TextSpec
from common.ops.table import Ops
from common.weights.tree import LayerWeights, TextWeights


class Residual(Protocol):
    """Between sublayers."""

    def to_mixer(self, layer: int) -> Tensor:
        """The normed input [rows, D] of a layer's mixer."""

    def from_mixer(self, layer: int, out: Tensor) -> None:
        """Take the mixer's output."""

    def to_ffn(self, layer: int) -> Tensor:
        """The normed input [rows, D] of a layer's feed-forward half."""

    def from_ffn(self, out: Tensor) -> None:
        """Take the feed-forward half's output."""

    def result(self, rows: Tensor | slice) -> Tensor:
        """The normed final states [len(rows), D] of some rows."""

    def prefix_after(self) -> Tensor:
        """The running sum [rows, D] after the layer just finished; changes nothing."""

    def stream_after(self, layer: int) -> Tensor:
        """What the next reader would read before its norm, [rows, D]; changes nothing."""


class Stream:
    """The ordinary pre-norm residual stream (Kimi-Linear)."""

    def __init__(self, weights: TextWeights, spec: TextSpec, ops: Ops, embedded: Tensor) -> None:
        """Start from the embeddings [rows, D]."""
        self._weights, self._eps, self._norm = weights, spec.eps, ops.rms_norm
        self._sum = embedded

    def to_mixer(self, layer: int) -> Tensor:
        """See `Residual`."""
        return self._norm(self._sum, self._weights.layers[layer].input_norm, self._eps)

    def from_mixer(self, layer: int, out: Tensor) -> None:
        """See `Residual`."""
        self._sum = self._sum + out

    def to_ffn(self, layer: int) -> Tensor:
        """See `Residual`."""
        return self._norm(self._sum, self._weights.layers[layer].post_norm, self._eps)

    def from_ffn(self, out: Tensor) -> None:
        """See `Residual`."""
        self._sum = self._sum + out

    def result(self, rows: Tensor | slice) -> Tensor:
        """See `Residual`."""
        return self._norm(self._sum[rows], self._weights.norm, self._eps)

    def prefix_after(self) -> Tensor:
        """See `Residual`."""
        return self._sum

    def stream_after(self, layer: int) -> Tensor:
        """See `Residual`."""
        return self._sum


class Blocks:
    """K3's attention residual: a bank of finished blocks and the running prefix of the present one.

    At the first layer of a block the prefix is stored and restarts from that layer's mixer output.
    """

    def __init__(self, weights: TextWeights, spec: TextSpec, ops: Ops, embedded: Tensor) -> None:
        """Start from the embeddings [rows, D]."""
        assert spec.residual_block is not None
        self._weights, self._spec, self._read = weights, spec, ops.residual_read
        self._block = spec.residual_block
        count = -(-spec.num_layers // self._block)
        self._bank = embedded.new_empty(len(embedded), count, spec.hidden)
        self._prefix, self._pending = embedded, None

    _pending: Tensor | None

    def to_mixer(self, layer: int) -> Tensor:
        """See `Residual`; stores the prefix where a block starts, after reading."""
        w = self._weights.layers[layer]
        starts = layer % self._block == 0
        out, self._prefix = self._read(
            self._prefix,
            self._bank,
            self._finished(layer),
            _score(w.mixer_score),
            eps=self._spec.eps,
            pending=self._pending,
            norm=w.input_norm,
            write_row=layer // self._block if starts else None,
        )
        self._pending = None
        return out

    def from_mixer(self, layer: int, out: Tensor) -> None:
        """See `Residual`; folded in by the next read, unless it starts a block."""
        if layer % self._block == 0:
            self._prefix = out
        else:
            self._pending = out

    def to_ffn(self, layer: int) -> Tensor:
        """See `Residual`; reads the block that this layer may have stored."""
        w = self._weights.layers[layer]
        out, self._prefix = self._read(
            self._prefix,
            self._bank,
            layer // self._block + 1,
            _score(w.ffn_score),
            eps=self._spec.eps,
            pending=self._pending,
            norm=w.post_norm,
        )
        self._pending = None
        return out

    def from_ffn(self, out: Tensor) -> None:
        """See `Residual`; folded in by the next read."""
        self._pending = out

    def result(self, rows: Tensor | slice) -> Tensor:
        """See `Residual`."""
        out, _ = self._read(
            self._prefix[rows],
            self._bank[rows],
            self._bank.shape[1],
            _score(self._weights.out_score),
            eps=self._spec.eps,
            pending=None if self._pending is None else self._pending[rows],
            norm=self._weights.norm,
        )
        return out

    def prefix_after(self) -> Tensor:
        """See `Residual`."""
        return self._prefix if self._pending is None else self._prefix + self._pending

    def stream_after(self, layer: int) -> Tensor:
        """See `Residual`."""
        following = layer + 1
        last = following == self._spec.num_layers
        score = self._weights.out_score if last else self._next(following).mixer_score
        out, _ = self._read(
            self._prefix,
            self._bank,
            self._finished(following),
            _score(score),
            eps=self._spec.eps,
            pending=self._pending,
        )
        return out

    def _next(self, layer: int) -> LayerWeights:
        return self._weights.layers[layer]

    def _finished(self, layer: int) -> int:
        """Blocks stored before this layer's own write."""
        return -(-layer // self._block)


def _score(score: Tensor | None) -> Tensor:
    assert score is not None
    return score
