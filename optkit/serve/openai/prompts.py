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
from typing import TypeVar

from optkit.runtime.kv.rolling import MOST_TOKENS, RollingWindow
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.serve.constraints.checker import ConstraintChecker
from optkit.serve.http.errors import ApiError, printable
from optkit.serve.openai.chat_prompt import render_chat
from optkit.serve.openai.defaults import SamplingDefaults
from optkit.serve.openai.fill_in import gap_prompt
from optkit.serve.openai.jobs import ChoiceJob, Prompt, Sender, choice_jobs
from optkit.serve.openai.protocol import OPENAI_DEFAULTS, ChatRequest, CompletionRequest, GenerationRequest
from optkit.serve.tools.formats import ChatFormat
from optkit.serve.tools.grammar import message_constraint
from optkit.text.tokenizer import Tokenizer

INLINE_CHARS = 4096  # about a millisecond of tokenization
COMPLETION_TOKENS = 16  # OpenAI's default for completions

Result = TypeVar("Result")


class PromptReader:
    """Turns requests into the jobs of their choices.

    Args:
        tokenizer: of the served model.
        max_model_len: tokens of prompt and answer together.
        constraints: checks the constraints of requests.
        chat: the forms of tools and reasoning.
        defaults: for absent fields of requests.
        limits: of the scheduler, for rolling windows; None refuses them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_model_len: int,
        constraints: ConstraintChecker,
        chat: ChatFormat | None = None,
        defaults: SamplingDefaults = OPENAI_DEFAULTS,
        limits: SchedulerConfig | None = None,
    ) -> None:
        self.limits = limits
        self.tokenizer, self.max_model_len, self.constraints = tokenizer, max_model_len, constraints
        self.chat, self.defaults = chat or ChatFormat(), defaults
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")

    async def jobs(self, request: GenerationRequest, sender: Sender) -> list[ChoiceJob]:
        """The jobs of all choices of ``request``, prompt after prompt.

        Raises:
            ApiError: 400, for a wrong prompt or constraint.
        """
        rolling = self.rolling(request)
        if isinstance(request, ChatRequest):
            prompts = [await self._chat(request)]
        elif isinstance(request, CompletionRequest):
            held = await self.constraints.checked(request.constraint)
            prompts = [await self._prompt(prompt, request) for prompt in request.prompt]
            prompts = [prompt._replace(constraint=held) for prompt in prompts]
        else:
            raise TypeError(type(request).__name__)
        jobs: list[ChoiceJob] = []
        bad_words = tuple(ids for word in request.bad_words or () for ids in self.tokenizer.spellings(word))
        for prompt in prompts:
            limit = self._max_tokens(request, len(prompt.ids))
            ready = prompt._replace(bad_words=bad_words)
            eos_ids = self.tokenizer.eos_ids
            jobs += choice_jobs(request, sender, ready, len(jobs), limit, eos_ids, self.defaults, rolling)
        return jobs

    def rolling(self, request: GenerationRequest) -> RollingWindow | None:
        """The rolling window of ``request``, by its fields or by the options of the server; None keeps all tokens.

        Raises:
            ApiError: 400, the model or the engine can't serve the window.
        """
        limits = self.limits
        window, sinks = request.rolling_window, request.sink_tokens
        if limits is not None:
            window = limits.rolling_window if window is None else window
            sinks = limits.sink_tokens if sinks is None else sinks
        if request.sink_tokens and not window and request.rolling_window is None:
            message = "'sink_tokens' needs a 'rolling_window'"
            raise ApiError(message, param="sink_tokens", code="invalid_value")
        if not window or request.use_beam_search:  # whose beams are prompts, a token longer each time
            return None
        chosen = RollingWindow(window, sinks or 0)
        reason = "there are no rolling windows here" if limits is None else limits.rolling_refusal(chosen)
        if reason:
            of_sinks = (
                limits is not None and request.sink_tokens and reason == limits.sinks_refusal(chosen.sinks)
            )
            param = "sink_tokens" if of_sinks else "rolling_window"
            raise ApiError(reason, param=param, code="invalid_value")
        if request.specprefill and request.rolling_window:
            message = "a rolling window reads prompts whole: 'specprefill' needs 'rolling_window' to be 0"
            raise ApiError(message, param="specprefill", code="invalid_value")
        return chosen

    def longest(self, request: GenerationRequest) -> int:
        """The most tokens of ``request``, prompt and answer."""
        return MOST_TOKENS if self.rolling(request) else self.max_model_len

    async def _chat(self, request: ChatRequest) -> Prompt:
        text = await self.render(request)
        ids = await self._encode(text, request, "messages", special=bool(request.add_special_tokens))
        use, goes_on = request.tool_use, bool(request.continue_final_message)
        held = message_constraint(self.chat, use, request.constraint, text, goes_on)
        return self._truncated(text, ids, request)._replace(
            new_parser=functools.partial(self.chat.parser, use, text, goes_on),
            constraint=await self.constraints.checked(held),
            tags=self.tokenizer.special_ids(self.chat.tags(use, goes_on)),
        )

    async def chat_ids(self, request: ChatRequest) -> list[int]:
        """Token ids of the messages, however many."""
        return await self.token_ids(await self.render(request), bool(request.add_special_tokens))

    async def render(self, request: ChatRequest) -> str:
        """The messages as a single text."""
        size = sum(len(message.content) for message in request.messages)
        size += INLINE_CHARS if request.tools else 0  # schemas are long, and slow to write
        render = functools.partial(render_chat, self.tokenizer.chat_template, self.chat, request)
        return await self._run(size, render)

    async def _prompt(self, prompt: str | list[int], request: CompletionRequest) -> Prompt:
        if isinstance(prompt, str):
            special = request.add_special_tokens is not False
            text = gap_prompt(self.tokenizer, prompt, request.suffix) if request.suffix else prompt
            ids = await self._encode(text, request, "prompt", special=special)
            return self._truncated(prompt, ids, request)
        if request.suffix:
            raise ApiError("'suffix' needs a prompt in text", param="suffix", code="invalid_value")
        if not prompt:
            raise ApiError("the prompt is empty", param="prompt", code="empty_prompt")
        self.check_ids("prompt", prompt)
        return self._truncated(None, prompt, request)

    async def _encode(self, text: str, request: GenerationRequest, param: str, *, special: bool) -> list[int]:
        if not text:
            raise ApiError("the prompt is empty", param=param, code="empty_prompt")
        longest = self.longest(request)
        if len(text) > longest and request.truncate_prompt_tokens is None:
            self._refuse_hopeless(text, param, longest)  # a shorter text has too few characters
        ids = await self.token_ids(text, special)
        if not ids:
            raise ApiError("the prompt is empty", param=param, code="empty_prompt")
        return ids

    async def token_ids(self, text: str, special: bool) -> list[int]:
        """Token ids of any text, with or without the tokens that the tokenizer adds."""
        return await self._run(
            len(text), functools.partial(self.tokenizer.encode, text, add_special_tokens=special)
        )

    async def ids_of_each(self, texts: Sequence[str], param: str, special: bool) -> list[list[int]]:
        """Token ids of each of ``texts``, computed in one go; ``param`` is the field that they come from.

        Raises:
            ApiError: 400, a text too long for the context by its bytes alone.
        """
        longest = max(texts, key=len)
        if len(longest) > self.max_model_len:
            self._refuse_hopeless(longest, param, self.max_model_len)
        return await self.ids_of_texts(texts, special)

    async def ids_of_texts(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        """Token ids of each of ``texts``, of any length."""
        encode = functools.partial(self.tokenizer.encode, add_special_tokens=special)
        return await self._run(sum(map(len, texts)), lambda: [encode(text) for text in texts])

    async def text_of(self, ids: Sequence[int]) -> str:
        """Text of token ids of the vocabulary, special tokens included."""
        decode = functools.partial(self.tokenizer.decode, ids, skip_special_tokens=False)
        return await self._run(4 * len(ids), decode)

    async def _run(self, size: int, work: Callable[[], Result]) -> Result:
        if size <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _refuse_hopeless(self, text: str, param: str, limit: int) -> None:
        fewest = len(text.encode()) // self.tokenizer.longest_token
        if fewest > limit:
            raise overflow(limit, param, f"at least {fewest}")

    def _truncated(self, text: str | None, ids: list[int], request: GenerationRequest) -> Prompt:
        """The prompt after ``truncate_prompt_tokens``; the text may be "" for a prompt without echo."""
        keep = request.truncate_prompt_tokens
        if keep is not None:
            longest = self.longest(request)
            keep = self._fitting(request, longest) if keep == -1 else keep
            if not 1 <= keep <= longest:
                message = f"at least one token and at most {longest} must remain of the prompt"
                raise ApiError(message, param="truncate_prompt_tokens", code="invalid_value")
            if len(ids) > keep:
                text, ids = None, ids[:keep] if request.truncation_side == "right" else ids[-keep:]
        if text is None and request.echoes:
            text = self.tokenizer.decode(ids)
        return Prompt(tuple(ids), text or "")

    def _fitting(self, request: GenerationRequest, longest: int) -> int:
        """The most prompt tokens that fit the context, with the answer where the answer ends with the context."""
        answer = max(request.requested_max_tokens or 1, 1)
        return self.max_model_len - (answer if longest == self.max_model_len else 1)

    def check_ids(self, param: str, ids: Sequence[int]) -> None:
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
            ApiError: 400, prompt and answer do not fit ``longest`` together.
        """
        longest = self.longest(request)
        room, asked = longest - num_prompt, request.requested_max_tokens
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        if asked and isinstance(request, ChatRequest) and request.fills_context:
            asked = min(asked, max(room, 1))
        if room < max(asked or 1, 1):
            raise overflow(longest, param, num_prompt, asked)
        if longest > self.max_model_len:  # an answer of no stated length ends with the context all the same
            room = min(room, max(self.max_model_len - num_prompt, 0) or self.max_model_len)
        default = room if isinstance(request, ChatRequest) else min(COMPLETION_TOKENS, room)
        if self.defaults.max_new_tokens is not None:
            default = min(self.defaults.max_new_tokens, room)
        limit = default if asked is None else asked
        if (request.min_tokens or 0) > limit:
            message = f"min_tokens is {request.min_tokens}, but at most {limit} tokens are generated"
            raise ApiError(message, param="min_tokens", code="invalid_value")
        return limit

    def check_token_ids(self, request: GenerationRequest) -> None:
        """Refuse fields with ids outside the vocabulary, or without a token to choose."""
        for name, ids in request.named_tokens.items():
            self.check_ids(name, ids)
        allowed = set(request.allowed_token_ids or ())
        if request.min_tokens and allowed and allowed <= set(request.stop_ids(self.tokenizer.eos_ids)):
            message = "min_tokens forbids every one of the allowed tokens"
            raise ApiError(message, param="allowed_token_ids", code="invalid_value")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


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
