"""Answers of `/v1/completions`: plain text, whole and streamed, for one or many prompts.

Choice c of prompt p has the index p * n + c. Knows nothing of sockets.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from common.contract.messages import TokenItem, TokenOut
from router.logprobs import text_logprobs
from router.prompt.tokenizer import Tokenizer
from router.reading import TextReader
from router.replies import Head, usage
from router.schema.completions import CompletionRequest
from router.schema.replies import FinishReason, TextChoice, TextCompletion, TextLogprobs, Usage


class TextAnswer:
    """Both ways to answer: `chunks` for a stream, `take` and `whole` otherwise."""

    def __init__(
        self,
        request: CompletionRequest,
        prompts: Sequence[Sequence[int]],
        tokenizer: Tokenizer,
        head: Head,
    ) -> None:
        """Nothing has been said. `prompts` are the request's prompts as ids."""
        self.head = head
        self._tokenizer = tokenizer
        self._n = request.sampling.n
        self._best = request.sampling.logprobs
        self._usage: msgspec.UnsetType | None = None if request.include_usage else msgspec.UNSET
        self._prompt_tokens = sum(len(ids) for ids in prompts)
        echoes = [
            self._echo(p, ids) if request.echo else ""
            for p, ids in zip(request.prompts, prompts, strict=True)
        ]
        self._echoes = [echo for echo in echoes for _ in range(self._n)]
        count = len(prompts) * self._n
        self._readers = [TextReader(tokenizer, stop=request.stop) for _ in range(count)]
        self._texts: list[list[str]] = [[echo] for echo in self._echoes]
        self._tokens: list[list[TokenOut]] = [[] for _ in range(count)]
        self._length = [len(echo) for echo in self._echoes]

    def _echo(self, prompt: str | tuple[int, ...], ids: Sequence[int]) -> str:
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(ids)

    @property
    def is_complete(self) -> bool:
        """Whether every choice of every prompt has its finish reason."""
        return all(reader.finish is not None for reader in self._readers)

    def has_enough_of(self, prompt: int) -> bool:
        """Whether every choice of this prompt has its finish reason."""
        own = self._readers[prompt * self._n : (prompt + 1) * self._n]
        return all(reader.finish is not None for reader in own)

    def usage(self, *, cached: int = 0) -> Usage:
        """Usage so far; each prompt counts once."""
        completion = sum(reader.tokens for reader in self._readers)
        return usage(prompt=self._prompt_tokens, completion=completion, cached=cached)

    def take(self, prompt: int, item: TokenItem) -> None:
        """Read one choice's share of a frame, for a whole reply."""
        index = prompt * self._n + item.choice
        news = self._readers[index].feed(item)
        self._texts[index].append(news.content)
        if self._best is not None:
            self._tokens[index] += news.tokens

    def whole(self, used: Usage) -> TextCompletion:
        """The whole reply, once complete."""
        choices = [
            TextChoice(
                index=index,
                text="".join(texts),
                logprobs=self._logprobs(tokens, len(echo)),
                finish_reason=reader.finish or "stop",
            )
            for index, (texts, tokens, echo, reader) in enumerate(
                zip(self._texts, self._tokens, self._echoes, self._readers, strict=True)
            )
        ]
        return msgspec.structs.replace(self._reply(choices), usage=used)

    def opening(self) -> list[TextCompletion]:
        """First chunks: the echo of each prompt, where one was asked for."""
        return [
            self._reply([self._choice(index, echo)])
            for index, echo in enumerate(self._echoes)
            if echo
        ]

    def chunks(self, prompt: int, item: TokenItem) -> list[TextCompletion]:
        """Chunks for one choice's share of a frame; the last of a choice has the finish reason."""
        index = prompt * self._n + item.choice
        news = self._readers[index].feed(item)
        logprobs = self._logprobs(news.tokens, self._length[index]) if news.tokens else None
        self._length[index] += len(news.content)
        if not (news.content or logprobs or news.finish):
            return []
        return [self._reply([self._choice(index, news.content, logprobs, news.finish)])]

    def closing(self, used: Usage) -> list[TextCompletion]:
        """The last chunk before `[DONE]`: usage, if the request asked for it."""
        if self._usage is msgspec.UNSET:
            return []
        return [msgspec.structs.replace(self._reply([]), usage=used)]

    def _logprobs(self, tokens: Sequence[TokenOut], offset: int) -> TextLogprobs | None:
        if self._best is None:
            return None
        return text_logprobs(self._tokenizer, tokens, self._best, offset)

    def _choice(
        self,
        index: int,
        text: str,
        logprobs: TextLogprobs | None = None,
        finish: FinishReason | None = None,
    ) -> TextChoice:
        return TextChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish)

    def _reply(self, choices: Sequence[TextChoice]) -> TextCompletion:
        return TextCompletion(
            id=self.head.id,
            object="text_completion",
            created=self.head.created,
            model=self.head.model,
            choices=list(choices),
            usage=self._usage,
        )
