"""The tokens of a scripted reply: a test hook, reached only where the settings allow it."""

from __future__ import annotations

from router.prompt.tokenizer import Tokenizer
from router.schema.sampling import Script


def script_ids(tokenizer: Tokenizer, script: Script) -> tuple[int, ...]:
    """Ids that take the place of sampled ones; in the text, control tokens are written by name."""
    ids = script.ids or tuple(tokenizer.encode_marked(script.text))
    return (*ids, tokenizer.end_of_msg) if script.ends_message else ids
