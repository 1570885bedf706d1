"""Whether a form can be enforced, found out in a process of its own before any room hears of it.

A grammar that takes too long, or too much memory, ends that process and its own request, nothing
else; the next one starts a new process. Verdicts are kept, within a bound of bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from pathlib import Path

import msgspec

import common
from common.config.settings import GrammarSettings
from common.errors import InvalidRequest, ServingError
from common.grammar.shelf import weight
from common.grammar.worker import HEAD, Check, Verdict
from router.prompt.form import Form

START_S = 30.0  # patience until the vocabulary was read
ROOT = Path(common.__file__).parents[1]


class Grammars:
    """Checks forms, one at a time."""

    def __init__(self, directory: Path, settings: GrammarSettings) -> None:
        """`directory` is the checkpoint's. The process starts with the first form."""
        self._directory, self._settings = directory.resolve(), settings
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._verdicts: OrderedDict[bytes, tuple[str, int]] = OrderedDict()
        self._held = 0

    async def check(self, form: Form) -> None:
        """Refuse a form that cannot be enforced.

        Raises:
            InvalidRequest: why, with the field as `param`.
            ServingError: the process does not start.
        """
        key = form.grammar.hash
        if key not in self._verdicts:
            async with self._turn:
                if key not in self._verdicts:
                    self._keep(form, await self._judge(form))
        self._verdicts.move_to_end(key)
        if fault := self._verdicts[key][0]:
            raise InvalidRequest(f"`{form.param}` cannot be enforced: {fault}", param=form.param)

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        with contextlib.suppress(ConnectionError):
            await process.stdin.wait_closed()
        await process.stdout.read()
        await process.wait()

    async def _judge(self, form: Form) -> str:
        check = Check(grammar=form.grammar, beginnings=form.beginnings)
        data = msgspec.msgpack.encode(check)
        process = await self._running()
        assert process.stdin is not None
        bound_s = self._settings.compile_s
        try:
            async with asyncio.timeout(bound_s):
                process.stdin.write(len(data).to_bytes(HEAD, "big") + data)
                await process.stdin.drain()
                return (await _answer(process)).fault
        except TimeoutError:
            await self.close()
            return f"it takes longer than {bound_s:g} s to compile; make it simpler"
        except (asyncio.IncompleteReadError, ConnectionError):
            await self.close()
            return "it takes more memory to compile than it may; make it simpler"
        except BaseException:  # its answer would be taken for the next one's
            await self.close()
            raise

    async def _running(self) -> Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        await self.close()
        memory = str(self._settings.memory_bytes)
        command = [sys.executable, "-m", "common.grammar.worker", str(self._directory), memory]
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, cwd=ROOT
        )
        try:
            async with asyncio.timeout(START_S):
                await _answer(self._process)
        except (TimeoutError, asyncio.IncompleteReadError) as error:
            await self.close()
            raise ServingError("the process that compiles grammars does not start") from error
        except BaseException:
            await self.close()
            raise
        return self._process

    def _keep(self, form: Form, fault: str) -> None:
        size = weight(form.grammar)
        self._verdicts[form.grammar.hash] = (fault, size)
        self._held += size
        while self._held > self._settings.cache_bytes and len(self._verdicts) > 1:
            _, (_, old) = self._verdicts.popitem(last=False)
            self._held -= old


async def _answer(process: Process) -> Verdict:
    assert process.stdout is not None
    head = await process.stdout.readexactly(HEAD)
    data = await process.stdout.readexactly(int.from_bytes(head, "big"))
    return msgspec.msgpack.decode(data, type=Verdict)
