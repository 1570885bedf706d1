"""From a client's body to a task on the level of tokens: check, fetch, render, settle limits.

Everything a request may be refused for is found here, before any room hears of it. Knows the chat
format through `router/prompt` and the rooms not at all.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from common.config.bounds import told_of_context
from common.config.image_grid import load_image_rules
from common.config.settings import Settings
from common.config.spec import ModelSpec
from common.contract.messages import ImageRef, Sampling
from router.bodies import Origin
from router.grammars import Grammars
from router.images import FetchedImage, fetch_images
from router.jobs import Task
from router.prompt.form import Form, form_of, needs_form
from router.prompt.scripting import script_ids
from router.prompt.template import Prompt, render
from router.prompt.tokenizer import load_tokenizer
from router.schema import (
    ChatRequest,
    CompletionRequest,
    RequestLimits,
    fit_sampling,
    image_sources,
    parse_chat,
    parse_completion,
)

_log = logging.getLogger("baton.router")
T = TypeVar("T")
LARGE_BODY = 64 << 10  # bytes; a larger one is read in a thread, so that streams go on meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOrder:
    """A chat request, and the task that answers it."""

    request: ChatRequest
    task: Task

    @property
    def image_tokens(self) -> int:
        """Tokens of the prompt that stand for images."""
        return sum(ref.tokens for ref, _ in self.task.images)


class Desk:
    """The checkpoint's side of the front door: tokenizer, image rules and limits."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        """Read the tokenizer and the image rules of the settings' checkpoint.

        Raises:
            CheckpointError: a file of the checkpoint is missing or wrong.
        """
        directory = Path(settings.model.path)
        self.settings = settings
        if said := told_of_context(settings.model.context, spec.text.max_position):
            _log.warning(said)
        self.tokenizer = load_tokenizer(directory)
        self.grammars = Grammars(directory, settings.grammar)
        self._rules = load_image_rules(directory) if spec.vision is not None else None
        self.limits = RequestLimits(
            models=frozenset({settings.model.name}),
            vocab=self.tokenizer.vocab,
            context=settings.model.context or spec.text.max_position,
            eos=spec.eos,
            media_pad=spec.media_pad,
            max_choices=settings.router.max_choices,
            max_images=settings.images.max_count if self._rules else 0,
            default_max_tokens=settings.router.default_max_tokens,
            scripted=settings.testing.scripted,
        )

    async def read(self, parse: Callable[[bytes, RequestLimits], T], body: bytes) -> T:
        """Check a body with its path's `parse`.

        Raises:
            InvalidRequest: what is wrong with it.
            NotFound: its model is not served here.
        """
        if len(body) > LARGE_BODY:
            return await asyncio.to_thread(parse, body, self.limits)
        return parse(body, self.limits)

    async def read_chat(self, body: bytes) -> ChatRequest:
        """Check the body of a chat; raises as `read` does."""
        return await self.read(parse_chat, body)

    async def order_chat(
        self, request: ChatRequest, origin: Origin, named: Callable[[str], str] = str
    ) -> ChatOrder:
        """Settle the form of the answer, fetch the request's images and render its prompt.

        `named` puts the client's name of a field in the place of the chat's.

        Raises:
            InvalidRequest: a form cannot be enforced, an image is refused, or the prompt does not
                fit.
        """
        form: Form | None = None
        if needs_form(request):
            form = await asyncio.to_thread(self._form, request)
            await self.grammars.check(form)
        images = await self._fetch(request)
        prompt = await asyncio.to_thread(self._render, request, images)
        sampling = fit_sampling(request, len(prompt.token_ids), self.limits)
        if form is not None:
            sampling = msgspec.structs.replace(sampling, grammar=form.grammar)
        if request.script is not None:
            script = script_ids(self.tokenizer, request.script)
            sampling = msgspec.structs.replace(sampling, script=script)
        task = self._task(
            origin,
            token_ids=prompt.token_ids,
            sampling=sampling,
            images=tuple((image.ref, image.payload) for image in images),
            image_offsets=prompt.image_offsets,
            image_params=tuple(named(s.param) for s in image_sources(request.messages)),
            priority=request.priority,
        )
        return ChatOrder(request=request, task=task)

    async def count_chat(self, request: ChatRequest) -> int:
        """Tokens of the request's prompt, those of its images included.

        Raises:
            InvalidRequest: an image is refused.
        """
        images = await self._fetch(request)
        return len((await asyncio.to_thread(self._render, request, images)).token_ids)

    async def _fetch(self, request: ChatRequest) -> list[FetchedImage]:
        sources = image_sources(request.messages)
        if self._rules is None or not sources:
            return []
        return await fetch_images(sources, self.settings.images, self._rules)

    async def read_text(self, body: bytes) -> CompletionRequest:
        """Check the body of a plain completion; raises as `read` does."""
        return await self.read(parse_completion, body)

    async def order_text(self, request: CompletionRequest, origin: Origin) -> tuple[Task, ...]:
        """One task a prompt.

        Raises:
            ContextLengthExceeded: a prompt does not fit.
        """
        prompts = await asyncio.to_thread(self._encode, request.prompts)
        tasks = []
        for index, ids in enumerate(prompts):
            sampling = fit_sampling(request, len(ids), self.limits, param="prompt")
            if request.script is not None:
                script = script_ids(self.tokenizer, request.script)
                sampling = msgspec.structs.replace(sampling, script=script)
            one = dataclasses.replace(origin, name=f"{origin.name}-{index}")
            task = self._task(one, token_ids=ids, sampling=sampling, priority=request.priority)
            tasks.append(task)
        return tuple(tasks)

    def _encode(self, prompts: Sequence[str | tuple[int, ...]]) -> list[tuple[int, ...]]:
        return [tuple(self.tokenizer.encode(p)) if isinstance(p, str) else p for p in prompts]

    def _task(
        self,
        origin: Origin,
        *,
        token_ids: tuple[int, ...],
        sampling: Sampling,
        images: tuple[tuple[ImageRef, bytes], ...] = (),
        image_offsets: tuple[int, ...] = (),
        image_params: tuple[str, ...] = (),
        priority: int,
    ) -> Task:
        timeout_s = self.settings.server.request_timeout_s
        return Task(
            request=origin.name,
            token_ids=token_ids,
            sampling=sampling,
            deadline=asyncio.get_running_loop().time() + timeout_s,
            images=images,
            image_offsets=image_offsets,
            image_params=image_params,
            priority=priority,
            salt=_salt(origin.tenant),
            canary=random.random() < self.settings.router.canary_share,
            trace=origin.trace,
        )

    def _form(self, request: ChatRequest) -> Form:
        return form_of(self.tokenizer, request, source_bytes=self.settings.grammar.source_bytes)

    def _render(self, request: ChatRequest, images: list[FetchedImage]) -> Prompt:
        return render(
            self.tokenizer,
            request.messages,
            tools=request.tools,
            thinking=request.thinking,
            effort=request.effort,
            tool_choice=request.tool_choice,
            response_format=request.response_format,
            images=[image.ref for image in images],
        )


def _salt(tenant: str) -> bytes:
    """Keeps one tenant's cached prefixes out of another's reach."""
    return hashlib.blake2b(tenant.encode(), digest_size=16).digest() if tenant else b""
