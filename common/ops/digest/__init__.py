"""The additive digest and the finite check, one pass over memory.

Backends: `reference` (torch). The definition and its test vectors: docs/protocol.md.
"""

from common.ops.digest.reference import (
    MASK,
    Signature,
    digest_pages,
    digest_words,
    signature,
    splitmix64,
)

__all__ = ["MASK", "Signature", "digest_pages", "digest_words", "signature", "splitmix64"]
