"""A choice of an answer: engine outputs in, text out.

``generate_text`` is the only consumer of the engine. The generator detokenizes, looks for stop strings, and updates
the metrics. Leaving the generator early, by a stop string, a disconnect or a shutdown, closes the engine's generator,
which aborts the request and frees the KV.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import NamedTuple, Protocol, cast

import msgspec

from optkit.runtime.prefill import NO_ROOM, NOT_CACHED, PINS_IN_THE_WAY, TOO_MANY_PINS
from optkit.runtime.process.client import ENGINE_DIED, ENGINE_GONE, ENGINE_STOPPED
from optkit.runtime.types import (
    CONSTRAINT_FAILED,
    NO_TOKEN_LEFT,
    QUEUE_TIMEOUT,
    EngineRequest,
    FinishReason,
    FirstToken,
    TokenLogprob,
    TokenOutput,
)
from optkit.serve.engine_api import TokenSource
from optkit.serve.http.errors import ApiError, internal_error
from optkit.serve.openai.jobs import ChoiceJob
from optkit.serve.quarantine import QUARANTINED
from optkit.serve.tools.message import MessageParser
from optkit.serve.tools.parts import Kind, Part, joined, text_of
from optkit.text.detokenizer import StopStrings
from optkit.text.tokenizer import Tokenizer

TTFT_UNREACHABLE = "ttft_slo_unreachable"
OWN_FAILURES = {
    CONSTRAINT_FAILED: "constraint_failed",
    NO_TOKEN_LEFT: "no_token_left",
}  # of a request, with codes


class Delta(NamedTuple):
    """The text and tokens that engine outputs add to a choice of the answer.

    Attributes:
        num_tokens: generated for the choice so far, a stop token among them.
        logprobs: of the tokens since the last delta, when asked for.
        first: in the first delta.
        token_ids: generated since the last delta.
        parts: the text in parts, of a message with tools or reasoning; ``text`` is then the content.
        num_calls, num_reasoning: tool calls, and tokens of the reasoning, so far.
        stop: the stop string at the end of the text.
        num_forgotten: tokens that the last token did not see; None where none are forgotten.
    """

    choice: int
    text: str
    num_tokens: int
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] = ()
    first: FirstToken | None = None
    token_ids: tuple[int, ...] = ()
    parts: tuple[Part, ...] = ()
    num_calls: int = 0
    num_reasoning: int = 0
    stop: str | None = None
    num_forgotten: int | None = None


def parts_of(delta: Delta) -> tuple[Part, ...]:
    """The text of ``delta`` in parts, plain text too."""
    return delta.parts or ((Part("content", delta.text),) if delta.text else ())


class ChoiceObserver(Protocol):
    """Observes one choice (``optkit.serve.metrics.ChoiceMetrics``)."""

    num_tokens: int
    num_preemptions: int

    def first_token(self, first: FirstToken) -> None:
        """Record the parts of the time to first token."""
        ...

    def tokens(self, count: int) -> None:
        """Count new tokens."""
        ...

    def finish(self, reason: FinishReason) -> None:
        """Record the end of the choice."""
        ...


class Observer(Protocol):
    """Observes generation (``optkit.serve.metrics.Metrics``)."""

    def sequence(self, request: EngineRequest, n: int) -> ChoiceObserver:
        """The observer of a choice; ``n`` as in ``ChoiceJob``."""
        ...


async def generate_text(
    engine: TokenSource, tokenizer: Tokenizer, metrics: Observer, job: ChoiceJob
) -> AsyncGenerator[Delta, None]:
    """Deltas until a delta has a ``finish_reason``; outputs without new text are held until text follows, or the end.

    Raises:
        ApiError: 500 the engine failed this request, 503 the engine died or the wait was too long, 429 the first token
            would be late, 400 the request is blocked, or its constraint or exclusions allow no token.
    """
    request = job.request
    observed = metrics.sequence(request, job.n)
    choice = ChoiceStream(tokenizer, job)
    reason = FinishReason.ABORT
    try:
        async with aclosing(cast(AsyncGenerator[TokenOutput, None], engine.generate(request))) as outputs:
            async for output in outputs:
                delta = choice.push(output, observed)
                if delta and delta.finish_reason:
                    reason = delta.finish_reason
                if delta:
                    yield delta
                if reason is not FinishReason.ABORT:
                    return
        raise internal_error("the engine ended a stream without a reason")
    except ApiError:
        reason = FinishReason.ERROR
        raise
    finally:
        observed.finish(reason)


class ChoiceStream:
    """The state of a choice: detokenizer, stop strings, message parser, echo, and logprobs waiting for text."""

    def __init__(self, tokenizer: Tokenizer, job: ChoiceJob) -> None:
        self._job, self._min_tokens = job, job.request.sampling.min_tokens
        self._detokenizer = tokenizer.detokenizer(job.skip_special, job.tags)
        self._stops = StopStrings(job.stops, job.keep_stop)
        self._echo, self._logprobs = job.echo or "", list[TokenLogprob]()
        self._first: FirstToken | None = None
        self._forgotten: int | None = None
        self._ids: list[int] = []
        self._parser, self._num_reasoning, self._num_calls = job.parser, 0, 0
        self._spoken: Kind = "content"  # kind of the text that the stop strings hold
        if job.request.sampling.prompt_logprobs is not None:
            self._logprobs.append(TokenLogprob(job.request.prompt_ids[0], None))

    def push(self, output: TokenOutput, observed: ChoiceObserver) -> Delta | None:
        """The delta of ``output``; None while there is nothing to show."""
        observed.num_preemptions = output.num_preemptions
        raise_failure(output)
        if output.first:
            self._first = output.first
            observed.first_token(output.first)
        self._forgotten = output.num_forgotten
        self._logprobs += output.prompt_logprobs
        if not output.token_ids and not output.finish_reason:
            return None  # a part of the prompt was scored
        if self._job.prompt_only:
            return self._delta("", 0, FinishReason.LENGTH)
        new = output.generated_ids
        if new:
            observed.tokens(len(new))
        self._ids += new
        listed = len(new if self._job.list_stop_token else output.token_ids)
        self._logprobs += output.logprobs[:listed]
        if self._parser is None:
            piece, finish = self._text(output, observed.num_tokens)
            return self._delta(piece, observed.num_tokens, finish) if piece or finish else None
        parts, finish = self._message(self._parser, output, observed.num_tokens)
        if not parts and not finish:
            return None
        delta = self._delta(text_of(parts, "content"), observed.num_tokens, finish)
        return delta._replace(
            parts=tuple(parts), num_calls=self._num_calls, num_reasoning=self._num_reasoning
        )

    def _delta(self, piece: str, num_tokens: int, finish: FinishReason | None) -> Delta:
        text, self._echo = self._echo + piece, ""
        logprobs, self._logprobs = tuple(self._logprobs), []
        first, self._first = self._first, None
        ids, self._ids = tuple(self._ids), []
        stop = self._stops.matched
        forgotten = self._forgotten
        return Delta(
            self._job.index,
            text,
            num_tokens,
            finish,
            logprobs,
            first,
            ids,
            stop=stop,
            num_forgotten=forgotten,
        )

    def _text(self, output: TokenOutput, num_tokens: int) -> tuple[str, FinishReason | None]:
        piece = self._without_stop(self._decode(output), num_tokens)
        if self._stops.matched is not None:
            return piece, FinishReason.STOP
        if output.finish_reason is not None:
            piece += self._stops.flush()
        return piece, output.finish_reason

    def _decode(self, output: TokenOutput) -> str:
        return self._detokenizer.push(output.token_ids) if output.token_ids else ""

    def _without_stop(self, text: str, num_tokens: int) -> str:
        """``text`` up to a stop string; before ``min_tokens`` a stop string is ordinary text."""
        return self._stops.push(text) if num_tokens >= self._min_tokens else text

    def _message(
        self, parser: MessageParser, output: TokenOutput, num_tokens: int
    ) -> tuple[list[Part], FinishReason | None]:
        """The parts of ``output``; tokens of the reasoning are counted singly."""
        parts: list[Part] = []
        finish: FinishReason | None = None
        for single, count in _singles(output, num_tokens) if parser.may_reason else [(output, num_tokens)]:
            self._num_reasoning += parser.is_reasoning and len(single.generated_ids)
            read, finish = parser.push(self._decode(single)), single.finish_reason
            if parser.is_done:
                finish = FinishReason.STOP
            if finish:
                read += parser.finish()
            parts += self._up_to_stop(read, count)
            if self._stops.matched is not None:
                finish = FinishReason.STOP
            elif finish:
                parts += self._held()
            if finish:
                break
        self._num_calls += sum(bool(part.name) for part in parts)
        if self._job.hides_reasoning:
            parts = [part for part in parts if part.kind != "reasoning"]
        return joined(parts), finish

    def _up_to_stop(self, read: list[Part], num_tokens: int) -> Iterator[Part]:
        """``read`` up to a stop string in the content or the reasoning. The text of a call stops nothing."""
        for part in read:
            if part.kind != self._spoken:
                yield from self._held()
            if part.kind == "call":
                yield part
                continue
            self._spoken = part.kind
            yield part._replace(text=self._without_stop(part.text, num_tokens))
            if self._stops.matched is not None:
                return

    def _held(self) -> list[Part]:
        """The text held for the stop strings, as no stop string follows."""
        return [Part(self._spoken, self._stops.flush())]


def _singles(output: TokenOutput, num_tokens: int) -> Iterator[tuple[TokenOutput, int]]:
    """The tokens of ``output`` as outputs of a token each, with the number of tokens up to there."""
    before = num_tokens - len(output.generated_ids)
    last = max(len(output.token_ids) - 1, 0)
    for at, token in enumerate(output.token_ids[:last]):
        yield (
            msgspec.structs.replace(output, token_ids=(token,), stop_token=None, finish_reason=None),
            before + at + 1,
        )
    yield msgspec.structs.replace(output, token_ids=output.token_ids[last:]), num_tokens


def raise_failure(output: TokenOutput) -> None:
    """Raise the error for the client, if ``output`` is the end of a request that failed.

    Raises:
        ApiError: as ``generate_text``; 409 where there is no room to pin a prefix.
    """
    if output.error in (ENGINE_DIED, ENGINE_GONE, ENGINE_STOPPED):
        raise ApiError("the engine is gone; try again", code="engine_unavailable", status=503, retry_after=1)
    if output.error == QUEUE_TIMEOUT:
        raise ApiError(f"{QUEUE_TIMEOUT}; try again later", code="queue_timeout", status=503, retry_after=1)
    if output.error == QUARANTINED:
        message = "this request ended the engine twice and is refused for some minutes"
        raise ApiError(message, code="request_quarantined")
    if output.error in (NO_ROOM, NOT_CACHED):
        message = f"{output.error}; drop pins, or raise --pinned-cache-share or --kv-cache-bytes"
        raise ApiError(message, param="pin", code="insufficient_kv_cache", status=409)
    if output.error == TOO_MANY_PINS:
        raise ApiError(f"{TOO_MANY_PINS}; drop pins", param="pin", code="too_many_pins", status=409)
    if output.error and output.error.startswith(PINS_IN_THE_WAY):
        raise ApiError(output.error, code="kv_cache_pinned")
    if output.error in OWN_FAILURES:
        raise ApiError(f"the answer can't go on: {output.error}", code=OWN_FAILURES[output.error])
    if output.retry_after is not None:
        message = "the first token would come after the deadline; try again later"
        seconds = max(1, math.ceil(output.retry_after))
        raise ApiError(message, code=TTFT_UNREACHABLE, status=429, retry_after=seconds)
    if output.finish_reason is FinishReason.ERROR:
        raise internal_error(output.error or "the engine failed a request")
    if output.finish_reason is FinishReason.ABORT:
        raise internal_error("the engine aborted a request")


def merge(streams: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """The deltas of all ``streams`` on arrival; one failure ends all. A single stream is returned unchanged."""
    return streams[0] if len(streams) == 1 else _merged(streams)


async def _merged(streams: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(maxsize=2 * len(streams))
    tasks = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    open_streams = len(streams)
    try:
        while open_streams:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                open_streams -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(stream: AsyncGenerator[Delta, None], queue: asyncio.Queue[Delta | Exception | None]) -> None:
    """Move ``stream`` into ``queue``; None marks the end, an exception the failure."""
    end: Exception | None = None
    try:
        async with aclosing(stream):
            async for delta in stream:
                await queue.put(delta)
    except Exception as error:  # noqa: BLE001 - raised again by _merged
        end = error
    await queue.put(end)


async def collect(
    deltas: AsyncGenerator[Delta, None], count: int, observe: Callable[[Delta], object]
) -> list[Delta]:
    """Each of ``count`` choices as a delta, by index; ``observe`` is called with every delta on arrival."""
    parts: list[list[Delta]] = [[] for _ in range(count)]
    async with aclosing(deltas):
        async for delta in deltas:
            observe(delta)
            parts[delta.choice].append(delta)
    return [
        found[-1]._replace(
            text="".join(delta.text for delta in found),
            logprobs=tuple(entry for delta in found for entry in delta.logprobs),
            token_ids=tuple(token for delta in found for token in delta.token_ids),
            parts=tuple(joined(part for delta in found for part in delta.parts)),
            first=found[0].first,
        )
        for found in parts
    ]
