"""The words the runtime speaks: requests, sampling parameters, scheduled batches, outputs.

Plain data without torch, so that the scheduler, the engine process and the API process share them.
Everything that crosses the process border is a ``msgspec.Struct`` and travels as msgpack.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    import torch


class EngineRefusal(ValueError):
    """A request the engine will never be able to serve; the message is the reason, fit for the client."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens of one request are chosen (names and meanings as in the OpenAI and vLLM APIs).

    ``temperature=0`` is greedy. ``top_k=0`` and ``min_p=0`` are off. ``seed`` makes sampling reproducible.
    ``logprobs`` and ``prompt_logprobs`` say how many likely tokens to report at each generated or prompt position;
    0 is the token itself only, None nothing. An empty ``allowed_token_ids`` allows every token.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def named_tokens(self) -> tuple[int, ...]:
        """Every token id that the parameters mention."""
        return self.stop_token_ids + self.allowed_token_ids + tuple(token for token, _ in self.logit_bias)


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate, as the API process hands it to the engine."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival: float  # time.monotonic() in the API process, before tokenization


class FinishReason(enum.StrEnum):
    STOP = "stop"  # a stop token or (set by the API process) a stop string
    LENGTH = "length"  # max_tokens or the context is full
    ABORT = "abort"  # the client went away
    ERROR = "error"  # this request failed; ``TokenOutput.error`` says why


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The natural logarithm of a token's probability, and of the most likely ones at its position.

    It is of the model's own distribution: before bias, penalties, temperature and filters.
    """

    token_id: int
    logprob: float | None  # None: nothing precedes the first token of a prompt
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine step produced for one request."""

    request_id: str
    token_ids: tuple[int, ...]  # new tokens of this step; a stop token is not among them
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()  # of token_ids, and of the stop token after them, when asked for
    prompt_logprobs: tuple[
        TokenLogprob, ...
    ] = ()  # of the next prompt tokens, from the second on, when asked for


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges of the engine after a step, for /metrics."""

    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    num_preemptions: int = 0
    iteration_tokens: int = 0


@dataclass(frozen=True)
class Failure:
    """Stands in a step's results for the token of a request that failed; ``message`` goes to the client."""

    message: str


@dataclass(eq=False)
class Sequence:
    """A request inside the engine: its tokens so far and how many of them have KV.

    Invariant: ``0 <= num_computed <= len(token_ids)``; new work is ``token_ids[num_computed:]``.
    """

    request: EngineRequest
    token_ids: list[int]
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)
    num_scored: int = 0  # prompt positions whose logprobs have been reported; a preemption leaves it alone

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def num_pending(self) -> int:
        """Tokens that have no KV yet."""
        return len(self.token_ids) - self.num_computed

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]


@dataclass(frozen=True)
class ScheduledSequence:
    """``num_new`` tokens of ``seq``, from ``seq.num_computed`` on, run in this step."""

    seq: Sequence
    num_new: int
    all_logits: bool = False  # logits of each of the new tokens, not just of the last one

    @property
    def needs_logits(self) -> bool:
        """True when this chunk reaches the sequence's last token, so that a token is sampled."""
        return self.seq.num_computed + self.num_new == len(self.seq.token_ids)

    @property
    def num_logits(self) -> int:
        """How many of the new tokens, the last ones, get logits."""
        return self.num_new if self.all_logits else int(self.needs_logits)


@dataclass(frozen=True)
class Batch:
    """One step's work, in the order of the flattened token batch."""

    items: tuple[ScheduledSequence, ...]

    @property
    def num_tokens(self) -> int:
        return sum(item.num_new for item in self.items)


class Runner(Protocol):
    """Executes a batch on the model. ``optkit.runtime.runner.ModelRunner`` is the real one; tests use fakes."""

    vocab_size: int
    block_size: int
    num_blocks: int
    kv_bytes: int  # memory of the KV pool
    kv_dtype: str  # what it stores, for people

    def execute(self, batch: Batch) -> torch.Tensor:
        """Logits [sum of num_logits, vocab_size] float32, in batch order."""
        ...
