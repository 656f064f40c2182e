"""One sequence: engine outputs in, text out.

``generate_text`` is the only consumer of the engine. It detokenizes, looks for stop strings, and observes the
metrics. Leaving it early, by a stop string, a disconnect or a shutdown, closes the engine's generator, and
that aborts the request and frees its KV.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple, cast

from optkit.runtime.types import EngineRequest, FinishReason, TokenOutput
from optkit.serve.api_error import ApiError, internal_error
from optkit.serve.detokenizer import StopStrings
from optkit.serve.engine_api import Engine
from optkit.serve.metrics import Metrics, SequenceMetrics
from optkit.serve.tokenizer import Tokenizer


class Delta(NamedTuple):
    """What one engine output adds to the answer (the choice) of one prompt."""

    choice: int
    text: str
    num_tokens: int  # of the answer so far
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Work:
    """One sequence to generate, and what its text needs beyond the engine's request."""

    index: int
    request: EngineRequest
    stops: Sequence[str]


async def generate_text(
    engine: Engine, tokenizer: Tokenizer, metrics: Metrics, work: Work
) -> AsyncGenerator[Delta, None]:
    """Deltas until one has a ``finish_reason``; an output without new text and without an end gives none.

    Raises:
        ApiError: 500, the engine failed this request.
    """
    request = work.request
    observed = metrics.sequence(request.arrival, len(request.prompt_ids), request.sampling.max_tokens)
    text = _Text(tokenizer, work.stops, request.sampling.min_tokens)
    reason = FinishReason.ABORT
    try:
        async with aclosing(cast(AsyncGenerator[TokenOutput, None], engine.generate(request))) as outputs:
            async for output in outputs:
                piece, finish = _read(output, text, observed)
                if finish:
                    reason = finish
                if piece or finish:
                    yield Delta(work.index, piece, observed.num_tokens, finish)
                if finish:
                    return
        raise internal_error("the engine ended a stream without a reason")
    except ApiError:
        reason = FinishReason.ERROR
        raise
    finally:
        observed.finish(reason)


def _read(output: TokenOutput, text: _Text, observed: SequenceMetrics) -> tuple[str, FinishReason | None]:
    if output.finish_reason is FinishReason.ERROR:
        raise internal_error(output.error or "the engine failed a request")
    if output.finish_reason is FinishReason.ABORT:
        raise internal_error("the engine aborted a request")
    if output.token_ids:
        observed.tokens(len(output.token_ids))
    return text.push(output, observed.num_tokens)


class _Text:
    """Detokenizer and stop strings of one sequence."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], min_tokens: int) -> None:
        self._detokenizer, self._stops = tokenizer.detokenizer(), StopStrings(stops)
        self._min_tokens = min_tokens

    def push(self, output: TokenOutput, num_tokens: int) -> tuple[str, FinishReason | None]:
        piece = self._detokenizer.push(output.token_ids) if output.token_ids else ""
        if num_tokens >= self._min_tokens:  # before that, a stop string is ordinary text
            piece = self._stops.push(piece)
        if self._stops.matched is not None:
            return piece, FinishReason.STOP
        if output.finish_reason is not None:
            piece += self._stops.flush()
        return piece, output.finish_reason


async def merge(streams: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """The deltas of all ``streams`` as they come; one failure ends them all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for delta in only:
                yield delta
        return
    queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(maxsize=2 * len(streams))
    tasks = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    try:
        async for delta in _drain(queue, len(streams)):
            yield delta
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(stream: AsyncGenerator[Delta, None], queue: asyncio.Queue[Delta | Exception | None]) -> None:
    """Move ``stream`` into ``queue``; its end is None, its failure the exception."""
    end: Exception | None = None
    try:
        async with aclosing(stream):
            async for delta in stream:
                await queue.put(delta)
    except Exception as error:  # noqa: BLE001 - raised again by _drain
        end = error
    await queue.put(end)


async def _drain(queue: asyncio.Queue[Delta | Exception | None], open_streams: int) -> AsyncIterator[Delta]:
    while open_streams:
        item = await queue.get()
        if isinstance(item, Exception):
            raise item
        if item is None:
            open_streams -= 1
        else:
            yield item


async def collect(deltas: AsyncGenerator[Delta, None], count: int) -> list[Delta]:
    """The whole answer of each of ``count`` prompts, by index."""
    texts: list[list[str]] = [[] for _ in range(count)]
    last: dict[int, Delta] = {}
    async with aclosing(deltas):
        async for delta in deltas:
            texts[delta.choice].append(delta.text)
            last[delta.choice] = delta
    return [last[index]._replace(text="".join(texts[index])) for index in range(count)]
