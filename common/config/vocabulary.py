"""A tokenizer's pieces: bytes by rank, the names of control tokens, how text is cut.

Read from `tiktoken.model`, which has a line for every piece and none for the control tokens: those
fill the 256 slots after the ranks. How text becomes ids is not known here; `router/prompt` encodes,
`common/grammar` only needs to know what each id stands for.
"""

from __future__ import annotations

import base64
from pathlib import Path

from common.errors import CheckpointError

SLOTS = 256  # special slots after the ranks

# Offsets of the named slots from the first one. The release's slots keep these offsets in relatives
# of another vocabulary; every other slot is called by its own id.
NAMED = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}
END_OF_MSG = "<|end_of_msg|>"

# How text is cut into pieces before merging. Han is kept apart from other letters.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PIECES = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def control_tokens(ranks: int) -> dict[str, int]:
    """Ids of the control tokens by name, in order; they follow `ranks` ordinary pieces."""
    return {
        NAMED.get(slot, f"<|reserved_token_{ranks + slot}|>"): ranks + slot for slot in range(SLOTS)
    }


def read_ranks(path: Path) -> dict[bytes, int]:
    """Ordinary pieces and their ids, from the `tiktoken.model` file at `path`.

    Raises:
        CheckpointError: the file is missing or is not a list of base64 pieces and ranks.
    """
    try:
        lines = path.read_text().split("\n")
        ranks = {
            base64.b64decode(piece): int(rank) for piece, rank in (x.split() for x in lines if x)
        }
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; a checkpoint needs its tokenizer") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not a list of pieces and ranks: {error}") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(f"{path} does not number its {len(ranks)} pieces from 0 upwards")
    return ranks
