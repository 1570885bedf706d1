"""What a request may ask for at most: facts of the model and the settings, as one value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Bounds a request is checked against. `vocab` and `context` come from the checkpoint."""

    models: frozenset[str]  # names under which the model is served
    vocab: int
    context: int  # most tokens of prompt and answer together
    eos: int  # the id that ends a message
    media_pad: int | None = None  # the id that stands for a row of an image
    max_choices: int = 16
    max_images: int = 64
    max_tools: int = 512
    default_max_tokens: int | None = None  # None: up to the context
    scripted: bool = False  # `[testing] scripted`: accept `baton_script`
