"""Log-probabilities of tokens in both of OpenAI's forms.

A token's text is its bytes when they are whole characters, else their escapes: `bytes:\\xf0\\x9f`.
Control tokens are called by name and have no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.contract.messages import TokenOut
from router.prompt.tokenizer import Tokenizer
from router.schema.replies import TextLogprobs, TokenLogprob, TopLogprob

LEAST = -9999.0  # stands for a probability of zero: JSON has no infinity


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The token as a client reads it."""
    if name := tokenizer.name(token):
        return name
    piece = tokenizer.piece(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _bytes(tokenizer: Tokenizer, token: int) -> list[int] | None:
    return list(tokenizer.piece(token)) if tokenizer.name(token) is None else None


def _finite(logprob: float | None) -> float:
    return LEAST if logprob is None else min(0.0, max(LEAST, logprob))


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[TokenOut], best: int
) -> list[TokenLogprob]:
    """One entry a token, with the `best` most likely tokens at its place."""
    return [
        TokenLogprob(
            token=token_text(tokenizer, token.id),
            logprob=_finite(token.logprob),
            bytes=_bytes(tokenizer, token.id),
            top_logprobs=[
                TopLogprob(
                    token=token_text(tokenizer, other),
                    logprob=_finite(logprob),
                    bytes=_bytes(tokenizer, other),
                )
                for other, logprob in token.top[:best]
            ],
        )
        for token in tokens
    ]


def text_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[TokenOut], best: int, offset: int
) -> TextLogprobs:
    """The older form; `offset` is the length of the text before the first token."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(tokenizer.decode((token.id,), names=False))
    return TextLogprobs(
        tokens=[token_text(tokenizer, token.id) for token in tokens],
        token_logprobs=[_finite(token.logprob) for token in tokens],
        top_logprobs=[
            {token_text(tokenizer, other): _finite(logprob) for other, logprob in token.top[:best]}
            or None
            for token in tokens
        ],
        text_offset=offsets,
    )
