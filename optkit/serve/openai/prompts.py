"""Requests to choice jobs, with token ids that fit the context.

Short prompts are tokenized on the event loop, because a hop to a thread costs more than the work. Long prompts go to
a small thread pool, so other streams keep flowing. A text too long is refused by the length in bytes, before
tokenization.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from optkit.runtime.types import Constraint
from optkit.serve.http.errors import ApiError, printable
from optkit.serve.openai.jobs import ChoiceJob, Sender, choice_jobs
from optkit.serve.openai.protocol import ChatRequest, CompletionRequest, GenerationRequest
from optkit.text.chat_template import TemplateFailure
from optkit.text.tokenizer import Tokenizer

INLINE_CHARS = 4096  # about a millisecond of tokenization
RESERVED = frozenset(["messages", "tools", "documents", "add_generation_prompt", "chat_template"])
COMPLETION_TOKENS = 16  # OpenAI's default for completions

Result = TypeVar("Result")


class PromptReader:
    """Turns requests into the jobs of their choices.

    Args:
        tokenizer: of the served model.
        max_model_len: tokens of prompt and answer together.
    """

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self.tokenizer, self.max_model_len = tokenizer, max_model_len
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")

    async def jobs(
        self, request: GenerationRequest, sender: Sender, constraint: Constraint | None = None
    ) -> list[ChoiceJob]:
        """The jobs of all choices of ``request``, prompt after prompt, each with the checked ``constraint``.

        Raises:
            ApiError: 400, for a wrong prompt.
        """
        if isinstance(request, ChatRequest):
            prompts = [await self._chat(request)]
        elif isinstance(request, CompletionRequest):
            prompts = [await self._prompt(prompt, request) for prompt in request.prompt]
        else:
            raise TypeError(type(request).__name__)
        jobs: list[ChoiceJob] = []
        for ids, text in prompts:
            limit = self._max_tokens(request, len(ids))
            jobs += choice_jobs(
                request, sender, tuple(ids), text, len(jobs), limit, self.tokenizer.eos_ids, constraint
            )
        return jobs

    async def _chat(self, request: ChatRequest) -> tuple[list[int], str]:
        size = sum(len(message.content) for message in request.messages)
        text = await self._run(size, functools.partial(self.render, request))
        ids = await self._encode(text, request, "messages", special=bool(request.add_special_tokens))
        return self._truncated(text, ids, request)

    def render(self, request: ChatRequest) -> str:
        """The messages as a single text."""
        template = self.tokenizer.chat_template
        if template is None:
            message = "this model has no chat template; use /v1/completions"
            raise ApiError(message, param="messages", code="no_chat_template")
        reserved = RESERVED | set(template.special_tokens)
        for name in (request.chat_template_kwargs or {}).keys() & reserved:
            raise ApiError(f"'{name}' cannot be set here", param="chat_template_kwargs", code="invalid_value")
        messages = [message.for_template() for message in request.messages]
        variables = template_variables(request)
        render = template.render_open if request.continue_final_message else template.render
        try:
            return render(messages, **variables)
        except TemplateFailure as failure:
            raise ApiError(str(failure), param="messages", code="template_error") from failure

    async def _prompt(self, prompt: str | list[int], request: CompletionRequest) -> tuple[list[int], str]:
        if isinstance(prompt, str):
            special = request.add_special_tokens is not False
            ids = await self._encode(prompt, request, "prompt", special=special)
            return self._truncated(prompt, ids, request)
        if not prompt:
            raise ApiError("the prompt is empty", param="prompt", code="empty_prompt")
        self._check_ids("prompt", prompt)
        return self._truncated(None, prompt, request)

    async def _encode(self, text: str, request: GenerationRequest, param: str, *, special: bool) -> list[int]:
        if not text:
            raise ApiError("the prompt is empty", param=param, code="empty_prompt")
        if len(text) > self.max_model_len and request.truncate_prompt_tokens is None:
            self._refuse_hopeless(text, param)  # a shorter text has too few characters to be too long
        work = functools.partial(self.tokenizer.encode, text, add_special_tokens=special)
        ids = await self._run(len(text), work)
        if not ids:
            raise ApiError("the prompt is empty", param=param, code="empty_prompt")
        return ids

    async def _run(self, size: int, work: Callable[[], Result]) -> Result:
        if size <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _refuse_hopeless(self, text: str, param: str) -> None:
        fewest = len(text.encode()) // self.tokenizer.longest_token
        if fewest > self.max_model_len:
            raise overflow(self.max_model_len, param, f"at least {fewest}")

    def _truncated(
        self, text: str | None, ids: list[int], request: GenerationRequest
    ) -> tuple[list[int], str]:
        """Ids and text of a prompt after ``truncate_prompt_tokens``; the text may be "" for a prompt without echo."""
        keep = request.truncate_prompt_tokens
        if keep is not None:
            keep = self.max_model_len - max(request.requested_max_tokens or 1, 1) if keep == -1 else keep
            if not 1 <= keep <= self.max_model_len:
                message = f"at least one token and at most {self.max_model_len} must remain of the prompt"
                raise ApiError(message, param="truncate_prompt_tokens", code="invalid_value")
            if len(ids) > keep:
                text, ids = None, ids[:keep] if request.truncation_side == "right" else ids[-keep:]
        if text is None and request.echoes:
            text = self.tokenizer.decode(ids)
        return ids, text or ""

    def _check_ids(self, param: str, ids: Sequence[int]) -> None:
        """Refuse the first of ``ids`` outside the vocabulary; ``param`` is the field with the ids."""
        size = self.tokenizer.vocab_size
        if not ids or (min(ids) >= 0 and max(ids) < size):
            return
        wrong = next(token for token in ids if not 0 <= token < size)
        message = f"'{param}': {printable(str(wrong), 30)} is not a token id, which must be in [0, {size})"
        raise ApiError(message, param=param, code="invalid_token_id")

    def _max_tokens(self, request: GenerationRequest, num_prompt: int) -> int:
        """The tokens to generate after a prompt of ``num_prompt`` tokens; 0 when the request wants none.

        Raises:
            ApiError: 400, prompt and answer do not fit ``max_model_len`` together.
        """
        room, asked = self.max_model_len - num_prompt, request.requested_max_tokens
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        if room < max(asked or 1, 1):
            raise overflow(self.max_model_len, param, num_prompt, asked)
        default = room if isinstance(request, ChatRequest) else min(COMPLETION_TOKENS, room)
        limit = default if asked is None else asked
        if (request.min_tokens or 0) > limit:
            message = f"min_tokens is {request.min_tokens}, but at most {limit} tokens are generated"
            raise ApiError(message, param="min_tokens", code="invalid_value")
        return limit

    def check_token_ids(self, request: GenerationRequest) -> None:
        """Refuse fields with ids outside the vocabulary, or without a token to choose."""
        for name, ids in request.named_tokens.items():
            self._check_ids(name, ids)
        allowed = set(request.allowed_token_ids or ())
        if request.min_tokens and allowed and allowed <= set(request.stop_ids(self.tokenizer.eos_ids)):
            message = "min_tokens forbids every one of the allowed tokens"
            raise ApiError(message, param="allowed_token_ids", code="invalid_value")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def template_variables(request: ChatRequest) -> dict[str, Any]:
    """The chat template's variables in ``request``, with vLLM's meaning of ``reasoning_effort``."""
    variables: dict[str, Any] = dict(request.chat_template_kwargs or {})
    if request.add_generation_prompt is not None:
        variables["add_generation_prompt"] = request.add_generation_prompt
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
        variables.setdefault("enable_thinking", request.reasoning_effort != "none")
    return variables


def overflow(limit: int, param: str, num_prompt: int | str, asked: int | None = None) -> ApiError:
    """The 400 of a request too long for the context, in OpenAI's words.

    Clients search the message for OpenAI's words and then shorten the conversation.

    Args:
        limit: tokens of prompt and answer together.
        param: the field with the prompt.
        num_prompt: tokens of the prompt, or "at least N" for a prompt without tokenization.
        asked: ``max_tokens`` of the request; None or 0 without.
    """
    wanted = f"your {param} resulted in {num_prompt} tokens, and an answer needs at least one"
    shorten = param
    if asked and isinstance(num_prompt, int):
        total = num_prompt + asked
        wanted = f"you requested {total} tokens ({num_prompt} in the {param}, {asked} in the completion)"
        shorten = f"{param} or completion"
    message = (
        f"This model's maximum context length is {limit} tokens. However, {wanted}. "
        f"Please reduce the length of the {shorten}."
    )
    return ApiError(message, param=param, code="context_length_exceeded")
