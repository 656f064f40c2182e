"""Constraints of requests, compiled on trial before the engine.

A separate process (``child``), started for the first constrained request, does the work: the event loop and the engine
go on, and a hostile schema costs a bounded time of a core. Verdicts are kept, so a repeated schema is compiled here
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import sys
from collections import OrderedDict
from typing import NamedTuple

import msgspec

from optkit.errors import UserError
from optkit.extras import need_extra
from optkit.runtime.structured.compiler import FEATURE
from optkit.runtime.types import Constraint
from optkit.serve.constraints.messages import HEADER, Tokens, Verdict, frame
from optkit.serve.http.errors import ApiError, printable, unsupported
from optkit.text.tokenizer import Tokenizer

log = logging.getLogger("optkit.serve")

CHILD = "optkit.serve.constraints.child"
ANSWER_SECONDS = 30.0  # of the process, its start among them
MAX_KEPT, MAX_KEPT_CHARS = 512, 8 * 2**20
MAX_CHARS = 128 * 2**10  # of a constraint
UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[([^\]]*)\]")


class NamedConstraint(NamedTuple):
    """A constraint, and the name of the request's field."""

    constraint: Constraint
    param: str


class ConstraintChecker:
    """Compiles constraints on trial for ``tokenizer``."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._verdicts: OrderedDict[Constraint, asyncio.Task[Verdict]] = OrderedDict()
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def checked(self, named: NamedConstraint | None) -> Constraint | None:
        """The constraint in the form for the engine; None for None.

        Raises:
            ApiError: 400, the constraint is wrong, unsupported or too complex; 503, the check failed.
        """
        if named is None:
            return None
        constraint, param = named
        try:
            need_extra("structured", FEATURE)
        except UserError as error:
            raise unsupported(param, f"'{param}' is not available on this server: {error.what}") from None
        if len(constraint.value) > MAX_CHARS:
            raise _wrong(
                named, f"it has {len(constraint.value)} characters; at most {MAX_CHARS} are accepted"
            )
        verdict = await asyncio.shield(self._verdict(constraint))
        if verdict.error is not None:
            raise _wrong(named, verdict.error)
        return verdict.constraint

    async def close(self) -> None:
        """End the process."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    def _verdict(self, constraint: Constraint) -> asyncio.Task[Verdict]:
        """The verdict, found once for all requests with the constraint."""
        found = self._verdicts.pop(constraint, None)
        if found is None or (found.done() and (found.cancelled() or found.exception())):
            found = asyncio.create_task(self._ask(constraint))
        self._verdicts[constraint] = found
        while len(self._verdicts) > MAX_KEPT or self._num_chars() > MAX_KEPT_CHARS:
            self._verdicts.popitem(last=False)
        return found

    def _num_chars(self) -> int:
        return sum(len(kept.value) for kept in self._verdicts)

    async def _ask(self, constraint: Constraint) -> Verdict:
        async with self._turn:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    return await self._exchange(constraint)
            except (OSError, EOFError, TimeoutError, msgspec.MsgspecError) as error:
                log.exception("the process that compiles grammars failed")
                await self.close()
                message = "the constraint could not be checked; try again"
                raise ApiError(message, code="engine_unavailable", status=503, retry_after=1) from error

    async def _exchange(self, constraint: Constraint) -> Verdict:
        """Send ``constraint`` to the process, and wait for the verdict."""
        first = b""
        if self._process is None or self._process.returncode is not None:
            pipe = asyncio.subprocess.PIPE
            command = (sys.executable, "-P", "-m", CHILD)
            self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
            first = frame(Tokens(self._tokenizer.to_json(), self._tokenizer.vocab_size))
        writer, reader = self._process.stdin, self._process.stdout
        if writer is None or reader is None:
            raise OSError("the process has no pipes")
        writer.write(first + frame(constraint))
        await writer.drain()
        (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
        return msgspec.msgpack.decode(await reader.readexactly(length), type=Verdict)


def _wrong(named: NamedConstraint, reason: str) -> ApiError:
    """The 400 for a refused constraint."""
    if found := UNIMPLEMENTED.search(reason):
        reason = f"the schema has keywords that are not supported: {found[1].replace(chr(34), '')}"
    is_schema = named.constraint.kind == "json_schema"
    code = "invalid_json_schema" if is_schema else "invalid_value"
    return ApiError(f"'{named.param}': {printable(reason)}", param=named.param, code=code)
