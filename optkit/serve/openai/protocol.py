"""The requests of OpenAI's chat and completion endpoints, checked before anything is allocated.

Three kinds of fields:

- **supported**: typed and bounded below; a wrong value is 400 and names the field (``parsing``);
- **unsupported meaning** (``unsupported``: audio, images, ...): 400 unless the value asks for nothing, or
  accepted, if the field cannot change an answer here (``HARMLESS``);
- **unknown**: accepted with a log line, because clients send private extras and must keep working.

Beyond OpenAI, with vLLM's names and meanings: ``top_k, min_p, repetition_penalty, min_tokens, ignore_eos,
stop_token_ids, allowed_token_ids, include_stop_str_in_output, skip_special_tokens, add_special_tokens,
truncate_prompt_tokens, truncation_side, return_token_ids, return_tokens_as_token_ids, request_id,
add_generation_prompt, continue_final_message, use_beam_search, length_penalty``, and structured output
(``structured``); with llama.cpp's name and meaning ``repeat_last_n``.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from optkit.runtime.types import Constraint, SamplingParams
from optkit.serve.constraints.checker import NamedConstraint
from optkit.serve.openai.defaults import SamplingDefaults
from optkit.serve.openai.fields import (
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_INT,
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_SUFFIX_CHARS,
    BadWord,
    Content,
    Count,
    LogitBias,
    Natural,
    Penalty,
    Prompts,
    Scalar,
    Stops,
)
from optkit.serve.openai.structured import (
    Choices,
    Pattern,
    ResponseFormat,
    Schema,
    StructuredOutputs,
    constraint_of,
)
from optkit.serve.openai.tool_fields import Calls, Identifier, NamedTool, ToolChoice, Tools, tool_use
from optkit.serve.tools.use import ToolUse

log = logging.getLogger("optkit.serve")

OPENAI_DEFAULTS = SamplingDefaults()


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(BaseModel):
    """The common fields of chat and completions."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: Annotated[str, Field(max_length=512)] | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stops = []
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    stop_token_ids: Annotated[list[Natural], Field(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Natural | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: Annotated[list[Natural], Field(min_length=1, max_length=MAX_BIASES)] | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")] | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    ttft_details: bool | None = None
    specprefill: bool | None = None
    specprefill_keep_pct: Annotated[float, Field(gt=0, le=1)] | None = None
    rolling_window: Natural | None = None
    sink_tokens: Natural | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Pattern | None = None
    guided_whitespace_pattern: Pattern | None = None

    @property
    def constraint(self) -> NamedConstraint | None:
        """The constraint on the text of the answer, not compiled yet.

        Raises:
            ApiError: 400, several constraints, or a wrong one.
        """
        return constraint_of(self)

    @property
    def requested_max_tokens(self) -> int | None:
        """The ``max_tokens`` of the request; None for the endpoint's default."""
        return self.max_tokens

    @property
    def num_returned(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def num_choices(self) -> int:
        """Generated answers of each prompt."""
        return self.best_of or self.num_returned

    @property
    def is_ranked(self) -> bool:
        """True when only the best answers are returned."""
        return self.num_choices > self.num_returned

    @property
    def num_logprobs(self) -> int | None:
        """Likely tokens to report at each position of the answer, None for no logprobs."""
        return None

    @property
    def echoes(self) -> bool:
        """True when the answer begins with the prompt."""
        return False

    @property
    def named_tokens(self) -> dict[str, list[int]]:
        """The fields with token ids, and their ids."""
        return {
            "stop_token_ids": self.stop_token_ids or [],
            "allowed_token_ids": self.allowed_token_ids or [],
            "logit_bias": [token for token, _ in self.logit_bias or ()],
        }

    def stop_ids(self, eos_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The stop tokens of an answer."""
        return tuple(self.stop_token_ids or ()) + (() if self.ignore_eos else eos_ids)

    def sampling(
        self,
        max_tokens: int,
        eos_ids: tuple[int, ...],
        choice: int = 0,
        defaults: SamplingDefaults = OPENAI_DEFAULTS,
        constraint: Constraint | None = None,
        bad_words: tuple[tuple[int, ...], ...] = (),
    ) -> SamplingParams:
        """The sampling parameters of a choice; end-of-sequence ids are stop ids.

        Args:
            defaults: for absent fields of the request.
            constraint: on the text.
            bad_words: token ids of forbidden words.
        """
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=first_given(self.temperature, defaults.temperature, 1.0),
            top_p=first_given(self.top_p, defaults.top_p, 1.0),
            top_k=max(first_given(self.top_k, defaults.top_k, 0), 0),
            min_p=first_given(self.min_p, defaults.min_p, 0.0),
            seed=choice_seed(self.seed, choice),
            min_tokens=self.min_tokens or 0,
            stop_token_ids=self.stop_ids(eos_ids),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=first_given(self.repetition_penalty, defaults.repetition_penalty, 1.0),
            repeat_last_n=first_given(self.repeat_last_n, -1),
            logit_bias=self.logit_bias or (),
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            logprobs=0 if self.num_logprobs is None and self.is_ranked else self.num_logprobs,
            prompt_logprobs=self.num_logprobs if self.echoes else None,
            constraint=constraint,
            bad_words=bad_words,
        )


Number = TypeVar("Number", int, float)


def first_given(*values: Number | None) -> Number:
    """The first of ``values`` besides None; the last is never None."""
    return next(value for value in values if value is not None)


def choice_seed(seed: int | None, choice: int) -> int | None:
    """The seed of one of the ``n`` choices. The first choice has the request's seed, whatever ``n`` is."""
    if seed is None or choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:choice:{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)


class Message(BaseModel):
    """A turn; the template sees ``role``, ``content`` and the further fields that are given."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = ""
    name: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: str | None = None
    tool_calls: Calls | None = None
    tool_call_id: Identifier | None = None

    @model_validator(mode="after")
    def _fits_the_role(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only a message of the assistant has 'tool_calls'")
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("a message of role 'tool' needs a 'tool_call_id'")
        return self

    def for_template(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        for name in ("name", "reasoning_content", "tool_call_id"):
            if value := getattr(self, name):
                message[name] = value
        return message


class ChatRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: Annotated[dict[str, Scalar], Field(max_length=16)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    _fills_context: bool = PrivateAttr(default=False)

    @property
    def fills_context(self) -> bool:
        """True when an answer may also end with the context, before ``max_tokens``; else such a request is refused."""
        return self._fills_context

    def filling_context(self) -> ChatRequest:
        """The request with ``fills_context``."""
        self._fills_context = True
        return self

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def tool_use(self) -> ToolUse | None:
        """The tools of the answer; None when the answer may call none."""
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def names_tool(self) -> bool:
        """True when the request names the tool to call."""
        return isinstance(self.tool_choice, NamedTool)

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``. ``max_tokens`` 0 generates nothing: with ``echo`` the prompt is scored."""

    prompt: Prompts
    max_tokens: Natural | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: Annotated[str, Field(max_length=MAX_SUFFIX_CHARS)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)
