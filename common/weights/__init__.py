"""Checkpoint files to tensors: what is there, what goes where, and what is refused."""

from __future__ import annotations

from common.weights.load import load_text, load_vision, weight_identity

__all__ = ["load_text", "load_vision", "weight_identity"]
