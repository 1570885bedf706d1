"""The bundled checkpoint's tokenizer, for tests."""

from __future__ import annotations

from pathlib import Path

from router.prompt.tokenizer import Tokenizer, load_tokenizer

ROOT = Path(__file__).parents[2]


def nano_tokenizer() -> Tokenizer:
    return load_tokenizer(ROOT / "checkpoints/nano")
