"""`/tokenize` and `/detokenize`: bodies and their checks."""

from __future__ import annotations

import msgspec

from common.errors import InvalidRequest
from router.schema.limits import RequestLimits
from router.schema.sampling import Id


class TokenizeBody(msgspec.Struct, frozen=True):
    """The body of `POST /tokenize`."""

    prompt: str


class DetokenizeBody(msgspec.Struct, frozen=True):
    """The body of `POST /detokenize`."""

    tokens: list[Id]


def checked_ids(ids: list[int], limits: RequestLimits) -> list[int]:
    """Ids of the vocabulary.

    Raises:
        InvalidRequest: one of them is not.
    """
    if ids and max(ids) >= limits.vocab:
        raise InvalidRequest(
            f"`tokens` holds {max(ids)}; token ids run from 0 to {limits.vocab - 1}",
            param="tokens",
        )
    return ids
