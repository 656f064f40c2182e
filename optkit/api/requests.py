"""Requests of a loaded model, from checked fields to answers: the server's path without HTTP."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from optkit.api.engine_thread import EngineThread
from optkit.api.inputs import as_json, check_texts, known_options, prompt_text
from optkit.api.progress import ProgressCallback, ProgressEvent
from optkit.api.results import Choice, Completion, TextPiece, TokenScore, ToolCall
from optkit.errors import EngineError, UserError, nearest
from optkit.runtime.types import EngineRequest, FinishReason, FirstToken, TokenLogprob, TokenOutput
from optkit.serve.http.errors import ApiError
from optkit.serve.openai.best_of import best
from optkit.serve.openai.chat_message import finish_reason
from optkit.serve.openai.generation import OWN_FAILURES, Delta, collect
from optkit.serve.openai.jobs import ChoiceJob, Sender
from optkit.serve.openai.parsing import checked_request
from optkit.serve.openai.prompts import PromptReader
from optkit.serve.openai.protocol import ChatRequest, GenerationRequest
from optkit.serve.openai.sources import deltas_of
from optkit.serve.tools.formats import choose_format
from optkit.serve.tools.parts import Part, calls_of, text_of
from optkit.text.template_trial import check_template
from optkit.text.token_text import show

if TYPE_CHECKING:
    from optkit.runtime.process.client import EngineClient

Request = TypeVar("Request", bound=GenerationRequest)

IN_FLIGHT = 4  # prompts handed to the engine for each sequence that it runs


class Requests:
    """Checks and answers requests of the model ``name``.

    Args:
        prompts: of the model's tokenizer and context.
        max_num_seqs: sequences that the engine runs together.
    """

    def __init__(self, name: str, engine: EngineThread, prompts: PromptReader, max_num_seqs: int) -> None:
        self._name, self._engine, self._prompts, self._max_num_seqs = name, engine, prompts, max_num_seqs
        self._template_checked = False
        self._ids = itertools.count()

    def request(self, kind: type[Request], options: Mapping[str, Any], **own: Any) -> Request:
        """A checked request with ``options`` of the caller and fields of its own."""
        for name in options:
            if name not in known_options(kind):
                raise UserError(
                    f"unknown option '{name}'", where=self._name, fix=nearest(name, known_options(kind))
                )
        fields = {name: as_json(value) for name, value in options.items() if value is not None} | own
        for name, value in fields.items():
            check_texts(value, name)
        with own_errors():
            request = checked_request(kind, {"return_token_ids": True} | fields)
            self._prompts.check_token_ids(request)
        return request

    def chat_request(
        self,
        messages: Sequence[Mapping[str, Any]],
        logprobs: int | None,
        options: Mapping[str, Any],
        **own: Any,
    ) -> ChatRequest:
        template = self._prompts.tokenizer.chat_template
        if template is not None and not self._template_checked:
            self._prompts.chat = choose_format(check_template(template))
            self._template_checked = True
        scores = {} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}
        given = [dict(message) for message in messages]
        return self.request(ChatRequest, options, messages=given, **scores, **own)

    def run_all(
        self, requests: Sequence[GenerationRequest], progress: ProgressCallback | None
    ) -> list[Completion]:
        with own_errors():
            return self._engine.run(self._answer_all(requests, progress))

    async def _answer_all(
        self, requests: Sequence[GenerationRequest], progress: ProgressCallback | None
    ) -> list[Completion]:
        """The answers in order; one failure cancels all."""
        room = asyncio.Semaphore(IN_FLIGHT * self._max_num_seqs)
        done = itertools.count(1)

        async def answer(request: GenerationRequest) -> Completion:
            async with room:
                found = await self._answer(request)
            if progress is not None:
                progress(ProgressEvent("generating", (next(done), len(requests))))
            return found

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(answer(request)) for request in requests]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _answer(self, request: GenerationRequest) -> Completion:
        jobs, deltas = await self._start(request)
        answers = await collect(deltas, len(jobs), lambda delta: None)
        ids, first = jobs[0].request.prompt_ids, answers[0].first
        forgotten = sum(answer.num_forgotten or 0 for answer in answers)
        if request.is_ranked:
            answers = best(answers, request.num_choices, request.num_returned)
        choices = [self._choice(request, answer, answer.parts) for answer in answers]
        return Completion(
            prompt_text(request) or self._prompts.tokenizer.decode(ids, skip_special_tokens=False),
            ids,
            tuple(choices),
            first.cached_tokens if first else 0,
            ttft(first) if first else 0.0,
            first.kept_tokens if first else None,
            forgotten,
        )

    async def _start(self, request: GenerationRequest) -> tuple[list[ChoiceJob], AsyncGenerator[Delta, None]]:
        """The jobs of a request, and the deltas of all."""
        engine, tokenizer = Engine(self._engine.client), self._prompts.tokenizer
        jobs = await self._prompts.jobs(request, Sender(f"llm-{next(self._ids)}", time.monotonic()))
        return jobs, deltas_of(request, jobs, engine, tokenizer, Unobserved())

    def pieces(self, request: GenerationRequest) -> Iterator[TextPiece]:
        async def deltas() -> AsyncIterator[Delta]:
            _, found = await self._start(request)
            async with aclosing(found):
                async for delta in found:
                    yield delta

        parts: dict[int, list[Part]] = defaultdict(list)  # of calls, by choice
        with own_errors():
            for delta in self._engine.iterate(deltas):
                parts[delta.choice] += [part for part in delta.parts if part.kind == "call"]
                whole = self._choice(request, delta, parts[delta.choice] if delta.finish_reason else ())
                yield TextPiece(
                    whole.text,
                    whole.token_ids,
                    delta.choice,
                    whole.finish_reason or None,
                    whole.logprobs,
                    whole.reasoning,
                    whole.tool_calls,
                )

    def _choice(self, request: GenerationRequest, delta: Delta, calls: Sequence[Part]) -> Choice:
        """``delta`` as an answer; ``calls`` are the parts of all calls, of an answer that has ended."""
        names_tool = isinstance(request, ChatRequest) and request.names_tool
        shown = () if request.num_logprobs is None else delta.logprobs  # a ranking has them, too
        return Choice(
            delta.text,
            delta.token_ids,
            finish_reason(delta, names_tool) or "",
            tuple(map(self._score, shown)),
            text_of(delta.parts, "reasoning"),
            tuple(ToolCall(*call) for call in calls_of(calls)),
        )

    def _score(self, entry: TokenLogprob) -> TokenScore:
        top = tuple((token, self._shown(token), value) for token, value in entry.top)
        return TokenScore(entry.token_id, self._shown(entry.token_id), entry.logprob, top)

    def _shown(self, token: int) -> str:
        return show(self._prompts.tokenizer.token_texts.of(token))


class Engine:
    """The engine of one call as ``TokenSource``: a failed request raises ``EngineError`` with the reason.

    A failure by the request's own options passes, and becomes a ``UserError``.
    """

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenOutput]:
        outputs = cast(AsyncGenerator[TokenOutput, None], self._client.generate(request))
        async with aclosing(outputs):
            async for output in outputs:
                if output.finish_reason is FinishReason.ERROR and output.error not in OWN_FAILURES:
                    raise EngineError(output.error or "the engine failed a request")
                yield output


class Unobserved:
    """An observer without metrics (``generation.Observer``), and that of a choice."""

    def __init__(self) -> None:
        self.num_tokens = self.num_preemptions = 0

    def sequence(self, request: EngineRequest, n: int) -> Unobserved:
        return Unobserved()

    def first_token(self, first: FirstToken) -> None: ...

    def tokens(self, count: int) -> None:
        self.num_tokens += count

    def finish(self, reason: FinishReason) -> None: ...


@contextmanager
def own_errors() -> Iterator[None]:
    """Raise the exceptions of optkit in place of errors for HTTP clients."""
    try:
        yield
    except ApiError as error:
        if error.status >= 500:
            raise EngineError(error.message) from error
        named = error.param is None or error.param in error.message
        raise UserError(error.message, where=None if named else error.param) from error


def ttft(first: FirstToken) -> float:
    """Seconds from the call to the first token."""
    return first.before_queue + first.queue + first.prefill + first.chunk_wait
