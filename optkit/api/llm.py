"""``optkit.load``: an artifact as an ``LLM`` with ``generate``, ``chat``, ``stream`` and ``logprobs``.

The path of a request is the server's, without HTTP: the checks of ``serve/openai/protocol``, the prompts of
``serve/openai/prompts``, the text of ``serve/openai/generation``, and an engine process. So the same options give the
same answer as ``optkit serve``, and every option of docs/http-api.md that changes an answer is a keyword here.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from optkit.api.engine_thread import EngineThread
from optkit.api.guard import guarded
from optkit.api.inputs import (
    as_conversations,
    as_json,
    as_prompts,
    is_messages,
    known_options,
    prompt_text,
    sizes,
)
from optkit.api.progress import ProgressCallback, ProgressEvent
from optkit.api.results import Choice, Completion, Completions, ScoredText, TextPiece, TokenScore, single
from optkit.errors import EngineError, UserError, nearest
from optkit.recipe.engine_options import engine_options
from optkit.runtime.info import EngineInfo
from optkit.runtime.types import EngineRequest, FinishReason, FirstToken, TokenLogprob, TokenOutput
from optkit.serve.http.errors import ApiError
from optkit.serve.openai.generation import Delta, collect, generate_text, merge
from optkit.serve.openai.jobs import ChoiceJob, Sender
from optkit.serve.openai.prompts import PromptReader
from optkit.serve.openai.protocol import ChatRequest, CompletionRequest, GenerationRequest, checked_request
from optkit.text.chat_template import check_template
from optkit.text.token_text import show
from optkit.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from optkit.runtime.process.client import EngineClient

Request = TypeVar("Request", bound=GenerationRequest)
Messages = str | Sequence[Mapping[str, Any]]

IN_FLIGHT = 4  # prompts handed to the engine for each sequence that it runs


@guarded
def load(artifact: str | os.PathLike[str], *, verify: bool = True, **options: Any) -> LLM:
    """Load an artifact into an engine process.

    Args:
        artifact: a directory that ``optkit.optimize`` wrote.
        verify: check the hash of every file first, as ``optkit serve`` does.
        options: of the engine, by the names of the flags of ``optkit serve``: ``threads=4``,
            ``kv_cache_bytes="512MiB"``. They win over the recipe's ``serving`` and ``runtime``.

    Raises:
        UserError: no artifact, a damaged file, or a wrong option.
        EngineError: the engine process failed.
    """
    from optkit.artifact.open import Artifact

    engine = EngineThread()  # imports while the files are read
    try:
        opened = Artifact.open(os.fspath(artifact), verify=verify)
        given = engine_options(opened.recipe, sizes(options))
        tokenizer = Tokenizer.from_directory(opened.directory)
        info = engine.start(str(opened.directory), given)
        return LLM(opened.name, tokenizer, engine, info)
    except BaseException:
        engine.close()
        raise


class LLM:
    """A loaded model. Close it, or use it in a ``with`` statement, to end the engine process.

    Attributes:
        name: of the model.
        tokenizer: ``encode(text)`` and ``decode(ids)``.
        info: limits and memory of the engine.
    """

    def __init__(self, name: str, tokenizer: Tokenizer, engine: EngineThread, info: EngineInfo) -> None:
        self.name, self.tokenizer, self.info = name, tokenizer, info
        self._engine, self._prompts = engine, PromptReader(tokenizer, info.config.max_model_len)
        self._template_checked = False
        self._ids = itertools.count()
        self._finalizer = weakref.finalize(self, engine.close)

    # -- answers -------------------------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompts: str,
        *,
        logprobs: int | None = None,
        progress: ProgressCallback | None = None,
        **options: Any,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        *,
        logprobs: int | None = None,
        progress: ProgressCallback | None = None,
        **options: Any,
    ) -> Completions | Completion: ...

    @guarded
    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        *,
        logprobs: int | None = None,
        progress: ProgressCallback | None = None,
        **options: Any,
    ) -> Completion | Completions:
        """Continue ``prompts``: texts or lists of token ids; all run together.

        Args:
            prompts: one prompt gives a ``Completion``, a list of prompts gives ``Completions`` in the same order.
            logprobs: likely tokens to report at each generated position; 0 is the generated token only.
            progress: called after each answered prompt.
            options: of the request, as in docs/http-api.md: ``max_tokens`` (16), ``temperature`` (1), ``top_p``,
                ``top_k``, ``stop``, ``seed``, ``n``, ``min_tokens``, ``ignore_eos``, penalties, ``logit_bias``, ...

        Raises:
            UserError: a wrong option, or a prompt that does not fit the context.
            EngineError: the engine process ended, or the model failed on a request.
        """
        listed, is_single = as_prompts(prompts)
        requests = [
            self._request(CompletionRequest, options, prompt=[prompt], logprobs=logprobs) for prompt in listed
        ]
        return single(self._run_all(requests, progress), is_single)

    @guarded
    def chat(
        self,
        messages: Messages | Sequence[Sequence[Mapping[str, Any]]],
        *,
        logprobs: int | None = None,
        progress: ProgressCallback | None = None,
        **options: Any,
    ) -> Completion | Completions:
        """Answer a conversation through the model's chat template; several conversations run together.

        Args:
            messages: ``[{"role": "user", "content": "..."}]``, or a text, which is a user's message. A list of
                conversations gives ``Completions``.
            logprobs, progress: as in ``generate``.
            options: of the request, as in docs/http-api.md; ``max_tokens`` is the rest of the context by default.

        Raises:
            UserError: a wrong option, a model without a chat template, or messages that do not fit the context.
            EngineError: the engine process ended, or the model failed on a request.
        """
        listed, is_single = as_conversations(messages)
        requests = [self._chat_request(conversation, logprobs, options) for conversation in listed]
        return single(self._run_all(requests, progress), is_single)

    def stream(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        *,
        logprobs: int | None = None,
        **options: Any,
    ) -> Iterator[TextPiece]:
        """The answer piece by piece, while it is generated; leaving the loop early ends the generation.

        Args:
            prompt: a text or token ids to continue, as in ``generate``; or messages, as in ``chat``.
            logprobs, options: as in ``generate`` and ``chat``.

        Raises:
            UserError, EngineError: as ``generate``.
        """
        if is_messages(prompt):
            messages = cast(Sequence[Mapping[str, Any]], prompt)
            return self._pieces(self._chat_request(messages, logprobs, options))
        (one,), _ = as_prompts(prompt)
        return self._pieces(self._request(CompletionRequest, options, prompt=[one], logprobs=logprobs))

    @guarded
    def logprobs(
        self, texts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]], *, top: int = 0
    ) -> ScoredText | list[ScoredText]:
        """The log probability of each token of ``texts``; nothing is generated.

        Args:
            texts: one text (or list of token ids) gives a ``ScoredText``, a list gives a list.
            top: likely tokens to report at each position.

        Raises:
            UserError, EngineError: as ``generate``.
        """
        listed, is_single = as_prompts(texts)
        requests = [
            self._request(CompletionRequest, {}, prompt=[text], max_tokens=0, logprobs=top, echo=True)
            for text in listed
        ]
        found = self._run_all(requests, None)
        scored = [ScoredText(one.choices[0].text, one.choices[0].logprobs) for one in found]
        return scored[0] if is_single else scored

    # -- requests ------------------------------------------------------------------------------------------

    def _request(self, kind: type[Request], options: Mapping[str, Any], **own: Any) -> Request:
        """A checked request with ``options`` of the caller and fields of its own."""
        for name in options:
            if name not in known_options(kind):
                raise UserError(
                    f"unknown option '{name}'", where=self.name, fix=nearest(name, known_options(kind))
                )
        fields = {name: as_json(value) for name, value in options.items() if value is not None} | own
        with own_errors():
            request = checked_request(kind, {"return_token_ids": True} | fields)
            self._prompts.check_token_ids(request)
        return request

    def _chat_request(
        self, messages: Sequence[Mapping[str, Any]], logprobs: int | None, options: Mapping[str, Any]
    ) -> ChatRequest:
        template = self.tokenizer.chat_template
        if template is not None and not self._template_checked:
            check_template(template)
            self._template_checked = True
        scores = {} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}
        return self._request(ChatRequest, options, messages=[dict(message) for message in messages], **scores)

    def _run_all(
        self, requests: Sequence[GenerationRequest], progress: ProgressCallback | None
    ) -> list[Completion]:
        with own_errors():
            return self._engine.run(self._answer_all(requests, progress))

    async def _answer_all(
        self, requests: Sequence[GenerationRequest], progress: ProgressCallback | None
    ) -> list[Completion]:
        """The answers in order; one failure cancels all."""
        room = asyncio.Semaphore(IN_FLIGHT * self.info.config.max_num_seqs)
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
        choices = [self._choice(answer) for answer in answers]
        ids, first = jobs[0].request.prompt_ids, answers[0].first
        return Completion(
            prompt_text(request) or self.tokenizer.decode(ids, skip_special_tokens=False),
            ids,
            tuple(choices),
            first.cached_tokens if first else 0,
            ttft(first) if first else 0.0,
        )

    async def _start(self, request: GenerationRequest) -> tuple[list[ChoiceJob], AsyncGenerator[Delta, None]]:
        """The jobs of a request, and the deltas of all."""
        engine = Engine(self._engine.client)
        jobs = await self._prompts.jobs(request, Sender(f"llm-{next(self._ids)}", time.monotonic()))
        return jobs, merge([generate_text(engine, self.tokenizer, Unobserved(), job) for job in jobs])

    def _pieces(self, request: GenerationRequest) -> Iterator[TextPiece]:
        async def deltas() -> AsyncIterator[Delta]:
            _, found = await self._start(request)
            async with aclosing(found):
                async for delta in found:
                    yield delta

        with own_errors():
            for delta in self._engine.iterate(deltas):
                choice = self._choice(delta)
                reason = choice.finish_reason or None
                yield TextPiece(choice.text, choice.token_ids, delta.choice, reason, choice.logprobs)

    def _choice(self, delta: Delta) -> Choice:
        reason = delta.finish_reason.value if delta.finish_reason else ""
        return Choice(delta.text, delta.token_ids, reason, tuple(map(self._score, delta.logprobs)))

    def _score(self, entry: TokenLogprob) -> TokenScore:
        top = tuple((token, self._shown(token), value) for token, value in entry.top)
        return TokenScore(entry.token_id, self._shown(entry.token_id), entry.logprob, top)

    def _shown(self, token: int) -> str:
        return show(self.tokenizer.token_texts.of(token))

    # -- the end -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the engine process; further calls raise ``EngineError``."""
        self._finalizer()
        self._prompts.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        config = self.info.config
        return f"<LLM {self.name}: {config.max_model_len} tokens of context, {config.max_num_seqs} sequences together>"

    def _repr_html_(self) -> str:
        from optkit.api.html import fragment, html_table

        plan, config = self.info.memory_plan, self.info.config
        rows = [
            ("context", f"{config.max_model_len} tokens"),
            ("sequences together", str(config.max_num_seqs)),
            ("weights", f"{plan.weight_bytes / 2**20:.0f} MiB"),
            ("KV cache", f"{plan.num_bytes / 2**20:.0f} MiB of {plan.dtype}, {plan.num_tokens} tokens"),
            ("loaded in", f"{self.info.load_seconds:.1f} s"),
        ]
        return fragment(self.name, [html_table(("", ""), rows)])


class Engine:
    """The engine of one call as ``TokenSource``: a failed request raises ``EngineError`` with the reason."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenOutput]:
        outputs = cast(AsyncGenerator[TokenOutput, None], self._client.generate(request))
        async with aclosing(outputs):
            async for output in outputs:
                if output.finish_reason is FinishReason.ERROR:
                    raise EngineError(output.error or "the engine failed a request")
                yield output


class Unobserved:
    """An observer without metrics (``generation.Observer``), of one choice and of all."""

    def __init__(self) -> None:
        self.num_tokens = self.num_preemptions = 0

    def sequence(self, request: EngineRequest, n: int) -> Unobserved:
        return self

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
