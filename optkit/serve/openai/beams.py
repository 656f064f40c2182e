"""``use_beam_search``: the choices of a prompt are the best texts of a beam search.

Each step asks the engine for one token of every running beam, together, with the likeliest tokens. The prefix cache
has the KV of a beam but for its last block; without the cache each step computes the whole text again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import cast

import msgspec

from optkit.runtime.types import EngineRequest, FinishReason, SamplingParams, TokenOutput
from optkit.serve.engine_api import TokenSource
from optkit.serve.http.errors import internal_error
from optkit.serve.openai.beam_search import Beam, BeamOptions, BeamSearch
from optkit.serve.openai.generation import Delta, Observer, generate_text
from optkit.serve.openai.jobs import ChoiceJob
from optkit.text.tokenizer import Tokenizer


async def beam_text(
    engine: TokenSource,
    tokenizer: Tokenizer,
    metrics: Observer,
    jobs: Sequence[ChoiceJob],
    length_penalty: float,
) -> AsyncGenerator[Delta, None]:
    """The choices of a prompt, a delta each, the best first; all come at the end of the search.

    Args:
        jobs: of the choices, as many as beams.

    Raises:
        ApiError: as ``generate_text``.
    """
    sampling = jobs[0].request.sampling
    options = BeamOptions(
        width=len(jobs),
        max_tokens=sampling.max_tokens,
        stop_ids=frozenset(sampling.stop_token_ids),
        min_tokens=sampling.min_tokens,
        length_penalty=length_penalty,
        num_listed=sampling.logprobs or 0,
    )
    for job, output in zip(jobs, await _search(engine, jobs[0].request, options), strict=False):
        async with aclosing(generate_text(_Found(output), tokenizer, metrics, job)) as deltas:
            async for delta in deltas:
                yield delta


async def _search(engine: TokenSource, request: EngineRequest, options: BeamOptions) -> list[TokenOutput]:
    """The output of each choice; or a failure of the engine, as the only output."""
    search = BeamSearch(options)
    first: TokenOutput | None = None
    num_steps = 0
    while not search.is_done:
        asked = [
            _step(request, beam, f"{num_steps}-{i}", max(options.num_likely, options.num_listed))
            for i, beam in enumerate(search.running)
        ]
        outputs = await asyncio.gather(*(_token(engine, step) for step in asked))
        failed = next((output for output in outputs if not output.logprobs), None)
        if failed is not None:
            return [failed]
        first, num_steps = first or outputs[0], num_steps + 1
        search.advance([output.logprobs[0].top for output in outputs])
    return [_output(beam, search.has_stopped(beam), first) for beam in search.answers]


def _step(request: EngineRequest, beam: Beam, name: str, num_logprobs: int) -> EngineRequest:
    """The request for the next token of ``beam``."""
    return msgspec.structs.replace(
        request,
        request_id=f"{request.request_id}-{name}",
        prompt_ids=(*request.prompt_ids, *beam.token_ids),
        sampling=SamplingParams(max_tokens=1, temperature=0.0, logprobs=num_logprobs),
        arrival=time.monotonic() if beam.entries else request.arrival,  # deadlines are those of a first token
    )


async def _token(engine: TokenSource, request: EngineRequest) -> TokenOutput:
    """The output with the only token of ``request``, or the failure."""
    found: TokenOutput | None = None
    async with aclosing(cast(AsyncGenerator[TokenOutput, None], engine.generate(request))) as outputs:
        async for output in outputs:
            found = output if found is None or output.logprobs or output.error else found
    if found is None or not (
        found.logprobs or found.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
    ):
        raise internal_error("the engine ended a stream without logprobs")
    return found


def _output(beam: Beam, has_stopped: bool, first: TokenOutput | None) -> TokenOutput:
    """``beam`` as the engine would give a whole answer."""
    tokens = beam.token_ids
    return TokenOutput(
        request_id="",
        token_ids=tokens[:-1] if has_stopped else tokens,
        stop_token=tokens[-1] if has_stopped else None,
        finish_reason=FinishReason.STOP if has_stopped else FinishReason.LENGTH,
        logprobs=beam.entries,
        first=first.first if first else None,
    )


class _Found:
    """A source whose only output is known."""

    def __init__(self, output: TokenOutput) -> None:
        self._output = output

    async def generate(self, _request: EngineRequest) -> AsyncIterator[TokenOutput]:
        yield self._output
