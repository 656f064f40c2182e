"""``optkit.load``: an artifact as an ``LLM`` with ``generate``, ``chat``, ``stream``, ``embed`` and ``logprobs``.

The path of a request is the server's, without HTTP: the checks of ``serve/openai/protocol``, the prompts of
``serve/openai/prompts``, the text of ``serve/openai/generation``, and an engine process. So the same options give the
same answer as ``optkit serve``, and every option of docs/http-api.md with an effect on answers is a keyword here.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast, overload

import numpy as np

from optkit.api.engine_thread import EngineThread
from optkit.api.guard import guarded
from optkit.api.inputs import as_conversations, as_prompts, is_messages, sizes
from optkit.api.progress import ProgressCallback, ProgressEvent
from optkit.api.requests import Requests
from optkit.api.results import Completion, Completions, Embeddings, ScoredText, TextPiece, normalized, single
from optkit.errors import EngineError, UserError, nearest
from optkit.recipe.engine_options import engine_options
from optkit.runtime.info import EngineInfo
from optkit.runtime.pooling import POOLINGS, Pooling, grouped
from optkit.runtime.process.ipc import Embedded
from optkit.serve.constraints.checker import ConstraintChecker
from optkit.serve.openai.defaults import SamplingDefaults, read_defaults
from optkit.serve.openai.prompts import PromptReader
from optkit.serve.openai.protocol import OPENAI_DEFAULTS, CompletionRequest
from optkit.text.tokenizer import Tokenizer

GENERATION_CONFIGS = ("auto", "none")

Prompts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


@guarded
def load(
    artifact: str | os.PathLike[str], *, verify: bool = True, generation_config: str = "auto", **options: Any
) -> LLM:
    """Load an artifact into an engine process.

    Args:
        artifact: a directory written by ``optkit.optimize``.
        verify: check the hash of every file first, as ``optkit serve`` does.
        generation_config: ``auto`` takes the sampling defaults of the model's ``generation_config.json``, as
            ``optkit serve`` does; ``none`` takes those of OpenAI.
        options: of the engine, by the names of the flags of ``optkit serve``: ``threads=4``,
            ``kv_cache_bytes="512MiB"``. Options win over the recipe's ``serving`` and ``runtime``.

    Raises:
        UserError: no artifact, a damaged file, or a wrong option.
        EngineError: the engine process failed.
    """
    from optkit.artifact.open import Artifact

    if generation_config not in GENERATION_CONFIGS:
        fix = nearest(generation_config, GENERATION_CONFIGS)
        raise UserError(f"unknown generation_config '{generation_config}'", fix=fix)
    engine = EngineThread(artifact=os.fspath(artifact))  # imports while the files are read
    try:
        opened = Artifact.open(os.fspath(artifact), verify=verify)
        given = engine_options(opened.recipe, sizes(options))
        tokenizer = Tokenizer.from_directory(opened.directory)
        info = engine.start(str(opened.directory), given)
        defaults = read_defaults(opened.directory) if generation_config == "auto" else OPENAI_DEFAULTS
        return LLM(opened.name, tokenizer, engine, info, defaults)
    except BaseException:
        engine.close()
        raise


class LLM:
    """A loaded model. ``close``, or the end of a ``with`` statement, ends the engine process.

    Attributes:
        name: of the model.
        tokenizer: ``encode(text)`` and ``decode(ids)``.
        info: limits and memory of the engine.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        engine: EngineThread,
        info: EngineInfo,
        defaults: SamplingDefaults = OPENAI_DEFAULTS,
    ) -> None:
        self.name, self.tokenizer, self.info = name, tokenizer, info
        self._engine, constraints = engine, ConstraintChecker(tokenizer)
        limits = info.config
        self._prompts = PromptReader(
            tokenizer, limits.max_model_len, constraints, defaults=defaults, limits=limits
        )
        self._requests = Requests(name, engine, self._prompts, info.config.max_num_seqs)
        self._finalizer = weakref.finalize(self, end, engine, constraints)

    # -- answers -------------------------------------------------------------------------------------------

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: str | Sequence[int],
        *,
        logprobs: int | None = None,
        progress: ProgressCallback | None = None,
        **options: Any,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        *,
        logprobs: int | None = None,
        progress: ProgressCallback | None = None,
        **options: Any,
    ) -> Completions: ...

    @guarded
    def generate(
        self,
        prompts: Prompts,
        *,
        logprobs: int | None = None,
        progress: ProgressCallback | None = None,
        **options: Any,
    ) -> Completion | Completions:
        """Continue ``prompts``: texts or lists of token ids; all run together.

        Args:
            prompts: a single prompt gives a ``Completion``, a list of prompts gives ``Completions`` in the same order.
            logprobs: likely tokens to report at each generated position; 0 is the generated token only.
            progress: called after each answered prompt.
            options: of the request, as in docs/http-api.md: ``max_tokens`` (16), ``temperature`` (1), ``top_p``,
                ``top_k``, ``stop``, ``seed``, ``n``, ``min_tokens``, ``ignore_eos``, penalties, ``logit_bias``, ...

        Raises:
            UserError: a wrong option, or a prompt too long for the context.
            EngineError: the engine process ended, or the model failed on a request.
        """
        listed, is_single = as_prompts(prompts)
        requests = [
            self._requests.request(CompletionRequest, options, prompt=[prompt], logprobs=logprobs)
            for prompt in listed
        ]
        return single(self._requests.run_all(requests, progress), is_single)

    @overload
    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        logprobs: int | None = None,
        progress: ProgressCallback | None = None,
        **options: Any,
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Mapping[str, Any]]],
        *,
        logprobs: int | None = None,
        progress: ProgressCallback | None = None,
        **options: Any,
    ) -> Completions: ...

    @guarded
    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
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
            UserError: a wrong option, a model without a chat template, or messages too long for the context.
            EngineError: the engine process ended, or the model failed on a request.
        """
        listed, is_single = as_conversations(messages)
        requests = [self._requests.chat_request(conversation, logprobs, options) for conversation in listed]
        return single(self._requests.run_all(requests, progress), is_single)

    @guarded
    def stream(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        *,
        logprobs: int | None = None,
        **options: Any,
    ) -> Iterator[TextPiece]:
        """The answer piece by piece, during generation; leaving the loop early ends the generation.

        Args:
            prompt: a text or token ids to continue, as in ``generate``; or messages, as in ``chat``.
            logprobs, options: as in ``generate`` and ``chat``.

        Raises:
            UserError, EngineError: as ``generate``.
        """
        if is_messages(prompt):
            messages = cast(Sequence[Mapping[str, Any]], prompt)
            return self._requests.pieces(
                self._requests.chat_request(messages, logprobs, options, stream=True)
            )
        listed, is_single = as_prompts(prompt)
        if not is_single:
            raise UserError("a stream is of a single prompt", where="prompt", fix="use generate for several")
        own = {"prompt": listed, "logprobs": logprobs, "stream": True}
        return self._requests.pieces(self._requests.request(CompletionRequest, options, **own))

    @overload
    def logprobs(self, texts: str | Sequence[int], *, top: int = 0) -> ScoredText: ...  # type: ignore[overload-overlap]

    @overload
    def logprobs(
        self, texts: Sequence[str] | Sequence[Sequence[int]], *, top: int = 0
    ) -> list[ScoredText]: ...

    @guarded
    def logprobs(self, texts: Prompts, *, top: int = 0) -> ScoredText | list[ScoredText]:
        """The log probability of each token of ``texts``; nothing is generated.

        Args:
            texts: a single text (or list of token ids) gives a ``ScoredText``, a list gives a list.
            top: likely tokens to report at each position.

        Raises:
            UserError, EngineError: as ``generate``.
        """
        listed, is_single = as_prompts(texts)
        requests = [
            self._requests.request(
                CompletionRequest, {}, prompt=[text], max_tokens=0, logprobs=top, echo=True
            )
            for text in listed
        ]
        found = self._requests.run_all(requests, None)
        scored = [ScoredText(one.choices[0].text, one.choices[0].logprobs) for one in found]
        return scored[0] if is_single else scored

    @guarded
    def embed(
        self,
        texts: Prompts,
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        progress: ProgressCallback | None = None,
    ) -> Embeddings:
        """A vector for each of ``texts``, from the hidden states in front of the model's output head.

        The first call prepares the model without its head, over the weights in memory.

        Args:
            texts: a text, token ids, or a list of either; a single text gives a single vector.
            pooling: the state of the ``last`` token, the ``mean`` of all, or that of the first token (``cls``).
            normalize: give each vector the length 1.
            progress: called after each step.

        Raises:
            UserError: a text too long for the context, or an artifact for a GPU or without an output head.
            EngineError: the engine process ended, or the model failed.
        """
        if pooling not in POOLINGS:
            raise UserError(f"unknown pooling '{pooling}'", fix=nearest(pooling, POOLINGS))
        ids = [
            self.tokenizer.encode(text) if isinstance(text, str) else text for text in as_prompts(texts)[0]
        ]
        found = []
        for batch in grouped(ids, self.info.config.max_num_batched_tokens):
            found.append(vectors(self._engine.run(self._engine.client.embed(batch, pooling))))
            if progress is not None:
                progress(ProgressEvent("embedding", (sum(map(len, found)), len(ids))))
        rows = np.concatenate(found) if found else np.zeros((0, 0), np.float32)
        return Embeddings(normalized(rows) if normalize else rows, tuple(map(len, ids)), pooling)

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


def end(engine: EngineThread, constraints: ConstraintChecker) -> None:
    """End the process that checks constraints, and that of the engine.

    The garbage collector may call this on any thread, that of the engine among them, which can't wait for itself.
    """
    if engine.is_current_thread:
        threading.Thread(target=end, args=(engine, constraints), name="optkit-close").start()
        return
    constraints.end()
    engine.close()


def vectors(answer: Embedded) -> np.ndarray:
    """The vectors [prompts, size] float32 of an answer.

    Raises:
        UserError, EngineError: the answer is an error.
    """
    if answer.error is not None:
        raise (UserError if answer.is_user_error else EngineError)(answer.error)
    return np.frombuffer(answer.vectors, np.float32).reshape(-1, answer.size)
