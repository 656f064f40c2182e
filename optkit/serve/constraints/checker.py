"""Constraints of requests, compiled on trial before the engine.

A separate process (``CompilerProcess``), started for the first constrained request, does the work: the event loop and
the engine go on, and a hostile schema costs a bounded time of a core. Verdicts are kept, so a repeated schema is
compiled here once. Requests may come on several event loops, one after the other or at once.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import NamedTuple

from optkit.errors import UserError
from optkit.extras import need_extra
from optkit.runtime.structured import FEATURE
from optkit.runtime.types import Constraint
from optkit.serve.constraints.messages import Verdict
from optkit.serve.constraints.process import FAILURES, CompilerProcess
from optkit.serve.http.errors import ApiError, printable, unsupported
from optkit.text.tokenizer import Tokenizer

log = logging.getLogger("optkit.serve")

MAX_KEPT, MAX_KEPT_CHARS = 512, 8 * 2**20
MAX_CHARS = 128 * 2**10  # of a constraint
UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[([^\]]*)\]")
AT_LINE = re.compile(r"at (\d+)\(\d+\): failed to compile JSON schema: ")


class Origin(NamedTuple):
    """The field with a schema inside of a grammar, and the name of the tool if the schema is of a tool."""

    param: str
    function: str = ""


class NamedConstraint(NamedTuple):
    """A constraint, and the name of the request's field.

    Attributes:
        origins: of schemas inside of a grammar, by line, which counts from 1.
    """

    constraint: Constraint
    param: str
    origins: tuple[tuple[int, Origin], ...] = ()


class ConstraintChecker:
    """Compiles constraints on trial for ``tokenizer``."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._verdicts: OrderedDict[Constraint, Future[Verdict]] = OrderedDict()
        self._process: CompilerProcess | None = None
        self._lock = threading.Lock()  # event loops of several threads may ask

    async def checked(self, named: NamedConstraint | None) -> Constraint | None:
        """The constraint in the form for the engine; None for None.

        Raises:
            ApiError: 400, the constraint is wrong, unsupported or too complex; 503, the check failed.
        """
        if named is None:
            return None
        constraint, param = named.constraint, named.param
        try:
            need_extra("structured", FEATURE)
        except UserError as error:
            raise unsupported(param, f"'{param}' is not available on this server: {error.what}") from None
        if len(constraint.value) > MAX_CHARS:
            raise _wrong(
                named, f"it has {len(constraint.value)} characters; at most {MAX_CHARS} are accepted"
            )
        try:
            verdict = await asyncio.wrap_future(self._verdict(constraint))
        except FAILURES as error:
            log.exception("the process that compiles grammars failed")
            message = "the constraint could not be checked; try again"
            raise ApiError(message, code="engine_unavailable", status=503, retry_after=1) from error
        if verdict.error is not None:
            raise _wrong(named, verdict.error)
        return verdict.constraint

    async def close(self) -> None:
        """As ``end``, beside the event loop."""
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """End the process; a later constraint starts another."""
        with self._lock:
            process, self._process = self._process, None
            self._verdicts.clear()
        if process is not None:
            process.close()

    def _verdict(self, constraint: Constraint) -> Future[Verdict]:
        """The verdict, found once for all requests with the constraint."""
        with self._lock:
            found = self._verdicts.pop(constraint, None)
            if found is None or (found.done() and found.exception()):
                self._process = self._process or CompilerProcess(self._tokenizer)
                found = self._process.ask(constraint)
            self._verdicts[constraint] = found
            while len(self._verdicts) > MAX_KEPT or self._num_chars() > MAX_KEPT_CHARS:
                self._verdicts.popitem(last=False)
            return found

    def _num_chars(self) -> int:
        return sum(len(kept.value) for kept in self._verdicts)


def _wrong(named: NamedConstraint, reason: str) -> ApiError:
    """The 400 for a refused constraint."""
    is_schema, origin = named.constraint.kind == "json_schema", Origin(named.param)
    if at := AT_LINE.match(reason):
        found = dict(named.origins).get(int(at[1]))
        if found is not None:
            is_schema, origin, reason = True, found, reason[at.end() :]
    if missing := UNIMPLEMENTED.search(reason):
        reason = f"the schema has keywords that are not supported: {missing[1].replace(chr(34), '')}"
    if origin.function:
        message = f"Invalid schema for function '{origin.function}': {printable(reason)}"
        return ApiError(message, param=origin.param, code="invalid_function_parameters")
    code = "invalid_json_schema" if is_schema else "invalid_value"
    return ApiError(f"'{origin.param}': {printable(reason)}", param=origin.param, code=code)
