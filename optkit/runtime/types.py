"""Data types of the runtime: requests, sampling parameters, scheduled batches, outputs.

Plain data without torch, shared by the scheduler, the engine process and the API process. Every type that crosses the
process border is a ``msgspec.Struct`` and travels as msgpack.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from optkit.runtime.draft_tree import Move
from optkit.runtime.kv.peers import KVSource
from optkit.runtime.kv.rolling import Rolling, RollingWindow
from optkit.runtime.prefill import Prefill
from optkit.runtime.specprefill.settings import SpecPrefill

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from optkit.runtime.kv.prefix_cache import Node
    from optkit.runtime.sampling.counts import TokenCounts
    from optkit.runtime.specprefill.positions import Positions


QUEUE_TIMEOUT = "the request waited too long for its turn"
PENDING = -1  # stands in a request for a token that the device is still computing (optkit.runtime.overlap)
CONSTRAINT_FAILED = "the constraint is too complex or allows no further token"
NO_TOKEN_LEFT = "constraint, bad_words, min_tokens and allowed tokens together exclude every next token"
NO_SLOT = -1
NO_BLOCK = -1  # stands in a block table for a block that was given back
ALL_TOKENS = 1 << 62  # more than any request has


class EngineRefusal(ValueError):
    """A request the engine will never be able to serve; the message is the reason, fit for the client."""


class EngineOverload(EngineRefusal):
    """A request whose first token would be late; the client may come again after ``retry_after`` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ConstraintFailed(ValueError):
    """A constraint that is wrong, unsupported or too complex; the message says why."""


class Constraint(msgspec.Struct, frozen=True):
    """A set of allowed answers; each step allows only tokens that continue an allowed answer.

    Attributes:
        value: a JSON Schema as JSON text, a regular expression for the whole answer, a JSON list of strings, or a
            grammar in llguidance's Lark dialect; unused for ``json_object``.
        after: a trigger. Up to the end of its first occurrence the answer is free, and may end; afterwards the rest
            is constrained. Empty for a constraint from the first token on.
        whitespace: a regular expression of the whitespace between JSON tokens; empty for one space after ``:`` and
            ``,`` and none elsewhere.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    value: str = ""
    after: str = ""
    whitespace: str = ""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of a request (names and meanings as in the OpenAI and vLLM APIs).

    ``temperature=0`` is greedy. ``top_k=0`` and ``min_p=0`` are off. ``seed`` makes sampling reproducible.
    ``logprobs`` and ``prompt_logprobs`` are the number of likely tokens to report at each generated or prompt
    position: 0 is the sampled token only, None nothing. An empty ``allowed_token_ids`` allows every token. With a
    ``constraint`` a stop token is allowed only where the constraint allows the answer to end. Each of ``bad_words``
    is a sequence of tokens, whose last token is excluded after the rest. ``repetition_penalty`` looks at the last
    ``repeat_last_n`` tokens of prompt and answer; -1 is all.
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
    repeat_last_n: int = -1
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def named_tokens(self) -> tuple[int, ...]:
        """Every token id in the parameters."""
        biased = tuple(token for token, _ in self.logit_bias)
        return self.stop_token_ids + self.allowed_token_ids + biased + tuple(chain(*self.bad_words))


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, tag="add"):
    """A request to generate, sent from the API process to the engine.

    Attributes:
        arrival: ``time.monotonic()`` in the API process, before tokenization.
        priority: a smaller value is served earlier; ignored by ``fcfs``.
        cache_salt: requests of different salts share no KV.
        prefill: for a request that computes the KV of its prompt and generates nothing.
        source: another engine with KV of the prompt; None: none.
        continued: the last tokens of ``prompt_ids`` that are no prompt, but the beginning of the answer, from an
            engine that died. The answer goes on as if undisturbed: numbers drawn by a seed, penalties, ``min_tokens``,
            ``max_tokens``, bad words and the constraint count the tokens. Outputs have the following tokens alone.
        specprefill: the choice on SpecPrefill; None follows the engine's options.
        rolling: the tokens that are kept of a sequence longer than the context (``optkit.runtime.kv.rolling``); None
            keeps all, and the answer ends with the context.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival: float
    priority: int = 0
    cache_salt: str = ""
    prefill: Prefill | None = None
    source: KVSource | None = None
    continued: int = 0
    specprefill: SpecPrefill | None = None
    rolling: RollingWindow | None = None

    @property
    def num_prompt(self) -> int:
        """The number of tokens of the prompt."""
        return len(self.prompt_ids) - self.continued

    @property
    def reads_prefix_cache(self) -> bool:
        """False for a request with prompt logprobs: cached KV comes without logits."""
        return self.sampling.prompt_logprobs is None


class FinishReason(enum.StrEnum):
    STOP = "stop"  # a stop token or (set by the API process) a stop string
    LENGTH = "length"  # max_tokens or the context is full
    ABORT = "abort"  # the client went away
    ERROR = "error"  # the request failed; ``TokenOutput.error`` is the reason


class FirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of the time to first token, in seconds; their sum is the time from arrival to the token.

    Attributes:
        before_queue: from arrival to the engine's queue: reading, tokenizing, crossing the process border.
        queue: in the queue, until the request's first step.
        prefill: in steps that computed a part of the prompt, with the rest of their batches.
        chunk_wait: between prefill steps, while other requests were served or after a preemption.
        num_chunks: prefill steps.
        cached_tokens: prompt tokens with cached KV.
        kept_tokens: prompt tokens computed under SpecPrefill; None for a prompt computed whole.
    """

    before_queue: float
    queue: float
    prefill: float
    chunk_wait: float
    num_chunks: int
    cached_tokens: int
    kept_tokens: int | None = None

    def parts(self) -> dict[str, float]:
        """The parts by name, without those that are None."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The natural logarithm of a token's probability, and of the most likely tokens at its position.

    The distribution is the model's own, before bias, penalties, temperature and filters.
    """

    token_id: int
    logprob: float | None  # None: nothing precedes the first token of a prompt
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The output of an engine step for a request.

    Attributes:
        token_ids: new tokens of the answer, without the stop token.
        stop_token: the stop token at the end of the answer: generated and counted, but without text.
        logprobs: of ``token_ids`` and of the stop token, when the request wants logprobs.
        prompt_logprobs: of the next prompt tokens, from the second on, when the request wants prompt logprobs.
        error: the reason of a failure, for the client.
        retry_after: seconds after which a request refused for lack of time may come again.
        first: with the first token, or with an end without a token.
        num_preemptions: of the request so far.
        num_migrations: of the request so far, from a replica that died to another (``optkit.fleet.failover``).
        num_prefilled: tokens with cached KV, at the end of a request without an answer.
        num_forgotten: tokens that the last token did not see; None for a request that forgets nothing.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    retry_after: float | None = None
    first: FirstToken | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    stop_token: int | None = None
    num_preemptions: int = 0
    num_prefilled: int = 0
    num_migrations: int = 0
    num_forgotten: int | None = None

    @property
    def generated_ids(self) -> tuple[int, ...]:
        """The new tokens with the stop token, as counted by usage and metrics."""
        return self.token_ids if self.stop_token is None else (*self.token_ids, self.stop_token)


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """Gauges and counters of the engine after a step, for /metrics. Tokens, blocks, requests.

    ``num_deferred`` waiting requests could not be computed even if there were room. ``step_sizes`` are the counts of
    ``optkit.runtime.scheduling.step_sizes`` and ``step_tokens`` the tokens of all steps. ``kv_blocks_cached`` belong
    to no request and keep their KV until the room is needed. ``prefix_cache_queries`` are prompt tokens that were
    looked up, ``prefix_cache_hits`` the tokens found and taken over, ``prefix_cache_lost`` the tokens found that were
    computed again for lack of a checkpoint of the recurrent state. ``kv_blocks_pinned`` are among those used. On a
    GPU ``graph_captures`` and ``kernel_compilations`` stay constant once the engine is warm, and ``eager_steps`` fit
    no bucket. ``forced_tokens`` had no alternative in a constraint and were computed together with the token before.
    ``kv_blocks_fetched`` came from other engines; cached blocks of ``kv_bytes_fetched`` took
    ``kv_fetch_microseconds``, ``kv_blocks_rejected`` had wrong bytes,
    ``kv_blocks_sent`` went to other engines, and ``kv_fetch_failures`` fetches ended early or brought nothing.
    ``specprefill_tokens`` are prompt tokens with scores, ``specprefill_kept_tokens`` the computed ones.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    kv_blocks_total: int = 0
    kv_blocks_offloaded: int = 0
    kv_blocks_pinned: int = 0
    num_preemptions: int = 0
    num_deferred: int = 0
    state_slots_used: int = 0
    checkpoints_used: int = 0
    prefix_cache_lost: int = 0
    step_sizes: tuple[int, ...] = ()
    step_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    offload_saves: int = 0
    offload_loads: int = 0
    spec_decode_drafts: int = 0
    spec_decode_draft_tokens: int = 0
    spec_decode_accepted_per_pos: tuple[int, ...] = ()
    graph_captures: int = 0
    graph_replays: int = 0
    eager_steps: int = 0
    kernel_compilations: int = 0
    forced_tokens: int = 0
    kv_fetches: int = 0
    kv_fetch_failures: int = 0
    kv_fetch_microseconds: int = 0
    kv_bytes_fetched: int = 0
    kv_blocks_fetched: int = 0
    kv_blocks_rejected: int = 0
    kv_blocks_sent: int = 0
    specprefill_tokens: int = 0
    specprefill_kept_tokens: int = 0


@dataclass(frozen=True)
class Failure:
    """The result of a step for a failed request; ``message`` goes to the client."""

    message: str


class Matcher(Protocol):
    """The state of a constraint along an answer. Every method takes the tokens of the answer so far.

    The methods raise ``ConstraintFailed`` where the constraint can't be evaluated within its limits.
    """

    @property
    def is_ready(self) -> bool:
        """False while the grammar is being compiled; the request then waits."""
        ...

    def wait(self, timeout: float) -> None:
        """Return when ready, or after ``timeout`` seconds."""
        ...

    def allowed(self, output: Sequence[int]) -> np.ndarray:
        """The tokens that may follow, a bit each, [ceil(vocabulary / 32)] uint32; valid until the next call."""
        ...

    def forced(self, output: Sequence[int]) -> list[int]:
        """The next tokens, as far as there is no choice."""
        ...

    def num_valid(self, output: Sequence[int], draft: Sequence[int]) -> int:
        """The number of tokens at the beginning of ``draft`` that may follow."""
        ...

    def is_complete(self, output: Sequence[int]) -> bool:
        """True when nothing may follow."""
        ...


@dataclass
class PrefillTimes:
    """The times of a request until its first token, by ``time.monotonic()``. See ``FirstToken``."""

    queued: float = 0.0
    started: float | None = None
    prefill: float = 0.0
    num_chunks: int = 0
    cached_tokens: int = 0
    kept_tokens: int | None = None
    reported: bool = False

    def first_token(self, arrival: float, now: float) -> FirstToken:
        started = now if self.started is None else self.started
        return FirstToken(
            before_queue=max(self.queued - arrival, 0.0),
            queue=started - self.queued,
            prefill=self.prefill,
            chunk_wait=now - started - self.prefill,
            num_chunks=self.num_chunks,
            cached_tokens=self.cached_tokens,
            kept_tokens=self.kept_tokens,
        )


@dataclass(eq=False)
class Request:
    """A request inside the engine: the tokens so far and the number of tokens with KV.

    Invariant: ``0 <= num_computed <= len(token_ids)``; new work is ``token_ids[num_computed:]``. The last token of a
    request without an answer stands for all that may follow, and is never computed.

    Attributes:
        block_tables: a block table for each group of layers (``optkit.graph.kv_layout``); empty without a place. The
            blocks before a window are ``NO_BLOCK``.
        first_blocks: for each block table the number of ``NO_BLOCK`` entries, which are the first.
        num_reserved: blocks reserved for the rest of the prefill.
        num_admitted: tokens known at the admission, whose KV is computed by the prefill.
        num_uncached: tokens without cached KV on arrival.
        state_slot: the slot of the recurrent state, for models that have one; ``NO_SLOT`` without.
        borders: numbers of tokens after which a checkpoint of the recurrent state is taken, ascending.
        rolling: the node with the request's latest checkpoint in the answer.
        num_lost: tokens with cached KV, computed again for lack of a checkpoint.
        rank: place among all requests, fixed on arrival by the scheduling policy; the smallest goes first.
        digests: of the full blocks, as far as needed (``PrefixCache.digests``).
        nodes: the first blocks in the prefix cache.
        sealed: no further blocks enter the prefix cache.
        num_shareable: first tokens whose KV may enter the prefix cache (``optkit.runtime.kv.shareable``).
        times: times until the first token.
        num_preemptions: number of preemptions.
        matcher: the state of the constraint, for a request with a constraint.
        positions: of the tokens, where a part of the prompt has no KV (``optkit.runtime.specprefill``); None where the
            position of a token is its place.
        rule: the rule of forgetting; None keeps all tokens.
        num_forgotten: tokens without a place in the block table, whole blocks (``optkit.runtime.kv.rolling``).
        sink_blocks: the block for the sinks while the block table begins with another.
        stale_sinks: the KV of the sinks is to be computed with the next tokens.
        position_shift: the position of the first token.
        counts: of the tokens of a long answer with penalties.
    """

    received: EngineRequest
    token_ids: list[int]
    num_computed: int = 0
    block_tables: list[list[int]] = field(default_factory=list)
    first_blocks: list[int] = field(default_factory=list)
    num_reserved: int = 0
    num_admitted: int = 0
    num_uncached: int = 0
    state_slot: int = NO_SLOT
    borders: tuple[int, ...] = ()
    rolling: Node | None = None
    num_lost: int = 0
    rank: tuple[float, int] = (0.0, 0)
    digests: list[bytes] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    sealed: bool = False
    num_shareable: int = ALL_TOKENS
    times: PrefillTimes = field(default_factory=PrefillTimes)
    num_preemptions: int = 0
    num_scored: int = 0  # prompt positions with reported logprobs; unchanged by a preemption
    matcher: Matcher | None = None
    positions: Positions | None = None
    rule: Rolling | None = None
    num_forgotten: int = 0
    sink_blocks: list[int] = field(default_factory=list)
    stale_sinks: bool = False
    position_shift: int = 0
    counts: TokenCounts | None = None

    @property
    def reads_prefix_cache(self) -> bool:
        """False where cached KV would not do, which is without logits and of other positions."""
        return self.positions is None and self.received.reads_prefix_cache

    @property
    def request_id(self) -> str:
        return self.received.request_id

    @property
    def sampling(self) -> SamplingParams:
        return self.received.sampling

    @property
    def num_prompt(self) -> int:
        return self.received.num_prompt

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Number of tokens without KV, to be computed."""
        return len(self.token_ids) - self.num_computed - self.is_prefill_only

    @property
    def num_held(self) -> int:
        """Number of tokens with KV that the next token sees."""
        return self.num_computed - self.num_forgotten

    @property
    def until_change(self) -> int:
        """The most tokens of a step: up to the next token that sees other tokens forgotten."""
        return self.rule.next_change(self.num_computed) - self.num_computed if self.rule else ALL_TOKENS

    @property
    def sinks(self) -> tuple[int, ...]:
        """The tokens to compute anew at the front of the window, in the next step."""
        return tuple(self.token_ids[: self.rule.sinks]) if self.stale_sinks and self.rule else ()

    @property
    def is_prefill_only(self) -> bool:
        """True for a request that generates nothing."""
        return self.received.prefill is not None

    @property
    def is_background(self) -> bool:
        """True for a request without an answer, for which nobody waits."""
        return self.received.prefill is not None and not self.received.prefill.is_urgent

    @property
    def is_pending(self) -> bool:
        """True when the last token is not known yet."""
        return self.token_ids[-1] == PENDING

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    @property
    def is_complete(self) -> bool:
        """True when the constraint allows no further token."""
        return self.matcher is not None and self.matcher.is_complete(self.output_ids)


@dataclass(frozen=True)
class ScheduledRequest:
    """``num_new`` tokens of ``request``, from ``request.num_computed`` on, run in this step.

    The last of the new tokens are ``draft``, guesses of the tokens after the request's last token: a chain
    or a tree (``optkit.runtime.draft_tree``). ``sinks`` are tokens whose KV at the front of the window is
    written by the step, too (``optkit.runtime.kv.rolling``).
    """

    request: Request
    num_new: int
    draft: tuple[int, ...] = ()
    all_logits: bool = False  # logits of each of the new tokens, not just of the last one
    sinks: tuple[int, ...] = ()

    @property
    def needs_logits(self) -> bool:
        """True if the chunk reaches the request's last token, after which a token is sampled."""
        return self.request.num_computed + self.num_new >= len(self.request.token_ids)

    @property
    def num_logits(self) -> int:
        """The number of new tokens at the end with logits: the last known token and the draft, or all."""
        if self.all_logits:
            return self.num_new
        return 1 + len(self.draft) if self.needs_logits else 0

    @property
    def new_tokens(self) -> list[int]:
        """The tokens to compute."""
        start = self.request.num_computed
        return [*self.request.token_ids[start : start + self.num_new - len(self.draft)], *self.draft]


@dataclass(frozen=True)
class Transfer:
    """Copy the KV of a pool's ``block`` to ``host_block`` of the offload store (``save``), or back."""

    block: int
    host_block: int
    save: bool


@dataclass(frozen=True)
class BlockCopy:
    """Copy the KV of block ``source`` of the pool to block ``to``."""

    source: int
    to: int


@dataclass(frozen=True)
class StateCopy:
    """Copy the recurrent states of all layers from slot ``source`` to slot ``to``."""

    source: int
    to: int


@dataclass(frozen=True)
class Batch:
    """The work of a step, in the order of the flattened token batch.

    ``transfers`` and ``state_copies`` come first, each in order.

    Attributes:
        num_steps: the most steps to compute one after another, each with the tokens of the one before. More than one
            for decodes alone (``optkit.runtime.multi_step``).
        could_be_several: without guesses the step could have been one of several.
    """

    items: tuple[ScheduledRequest, ...]
    transfers: tuple[Transfer | BlockCopy, ...] = ()
    state_copies: tuple[StateCopy, ...] = ()
    num_steps: int = 1
    could_be_several: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(item.num_new + len(item.sinks) for item in self.items)


class EngineLost(BaseException):
    """A part of the engine in another process has ended or failed, so the engine process has to end.

    Not an ``Exception``, because the handler of failed batches inside a step must not catch it.
    """


class Runner(Protocol):
    """Executes a batch on the model. Implemented by ``optkit.runtime.runner.ModelRunner`` and by fakes of tests."""

    vocab_size: int
    block_size: int
    num_blocks: int
    kv_bytes: int  # memory of the KV pool
    state_bytes: int  # memory of the recurrent states, with the checkpoints
    kv_dtype: str  # element type, in words
    num_ranks: int  # processes that share the model, by layers or within them
    is_multi_step: bool  # it computes several decode steps in a call (optkit.runtime.multi_step)
    kv_windows: tuple[
        int, ...
    ]  # window of each group of layers with block tables of its own; 0 keeps all tokens
    weight_bytes: int

    def workspace_bytes(self, num_tokens: int, num_rows: int) -> int:
        """Memory in bytes of a step with ``num_tokens`` tokens and ``num_rows`` rows of logits; 0 if unknown."""
        ...

    def execute(self, batch: Batch) -> Any:
        """Logits [sum of num_logits, vocab_size] float32, in batch order: of NumPy, or on a device of torch."""
        ...

    def read_block(self, block: int) -> np.ndarray:
        """The KV of ``block`` in all layers, as bytes [n] uint8 on the host."""
        ...

    def write_block(self, block: int, data: np.ndarray) -> None:
        """Write the bytes of ``read_block`` into any block."""
        ...

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        """Copy recurrent states from slot to slot, in order."""
        ...

    def move_tokens(self, moves: Sequence[Move]) -> None:
        """Copy KV of tokens within their requests, for runners that take trees of guesses."""
        ...

    def copy_block(self, copy: BlockCopy) -> None:
        """Copy the KV of a block in all layers, after the steps before."""
        ...
