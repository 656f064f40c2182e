"""The limits of the scheduler, and the requests that can never be served. Plain numbers, without torch."""

from __future__ import annotations

from typing import get_args

from optkit.recipe.engine_options import SchedulingOptions, value_type
from optkit.runtime.kv.rolling import MOST_TOKENS, Rolling, RollingWindow
from optkit.runtime.kv.windows import most_blocks, most_tokens

POLICIES = get_args(value_type("scheduling_policy"))
LIMITS = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "num_blocks")


class SchedulerConfig(SchedulingOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of a step and of the KV pool, and the choice within the limits.

    Attributes:
        max_model_len: tokens of a request, prompt and answer; the model and the KV pool have room for as many.
        num_blocks: blocks of the KV pool.
        prefill_target_tokens: a step with so many prompt tokens takes no further prompt. About where the machine's
            matrix products reach full speed; 0 is ``max_num_batched_tokens``.
        num_host_blocks: blocks of the offload store; needs the prefix cache.
        num_state_slots: slots of recurrent states, one for each running request; 0 for a model without.
        num_checkpoints: states kept for the prefix cache; 0 makes every prompt of such a model start anew.
        variant_limits: the most tokens of each variant of the layers but the last; empty for a single variant.
        kv_windows: the window of each group of layers (``optkit.graph.kv_layout``) in tokens; 0 keeps all tokens.
        steps_in_flight: steps that are queued before their results are known, set by the engine.
        keeps_all: the reason why sequences keep all tokens; empty where a rolling window can forget some.
    """

    max_model_len: int
    num_blocks: int
    prefill_target_tokens: int = 0
    num_host_blocks: int = 0
    num_state_slots: int = 0
    num_checkpoints: int = 0
    variant_limits: tuple[int, ...] = ()
    kv_windows: tuple[int, ...] = (0,)
    steps_in_flight: int = 1
    keeps_all: str = ""

    def __post_init__(self) -> None:
        for name in LIMITS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}), so that every running request can decode in each step"
            )
        if self.scheduling_policy not in POLICIES:
            raise ValueError(
                f"scheduling_policy must be one of {', '.join(POLICIES)}, not {self.scheduling_policy!r}"
            )
        if self.num_host_blocks and not self.enable_prefix_caching:
            raise ValueError(
                "num_host_blocks needs enable_prefix_caching: host blocks hold evicted KV of the prefix cache"
            )
        if self.num_state_slots not in (0, self.max_num_seqs):
            raise ValueError("num_state_slots must be max_num_seqs, a slot for each running request")
        if self.num_state_slots and self.num_host_blocks:
            raise ValueError("num_host_blocks must be 0 for a model with recurrent states")
        if self.num_state_slots and any(self.kv_windows):
            raise ValueError("kv_windows must be (0,) for a model with recurrent states")
        if self.rolling is not None and (reason := self.rolling_refusal(self.rolling)):
            raise ValueError(reason)
        if self.enforce_ttft_slo and not self.ttft_slo_ms:
            raise ValueError("enforce_ttft_slo needs a ttft_slo_ms")

    @property
    def max_pinned_blocks(self) -> int:
        """The most blocks of pinned prefixes."""
        return int(self.num_blocks * self.pinned_cache_share) if self.enable_prefix_caching else 0

    @property
    def few_tokens(self) -> int:
        """The most tokens of a step whose layers may run another variant than for many tokens; 0: none."""
        return max(self.variant_limits, default=0)

    @property
    def prefill_target(self) -> int:
        """Prompt tokens after which a step takes no further prompt."""
        return self.prefill_target_tokens or self.max_num_batched_tokens

    @property
    def tokens_in_flight(self) -> int:
        """The most tokens of a request in steps without results."""
        return self.max_num_batched_tokens * self.steps_in_flight

    @property
    def rolling(self) -> RollingWindow | None:
        """The rolling window of requests that do not choose; None keeps all tokens."""
        return RollingWindow(self.rolling_window, self.sink_tokens) if self.rolling_window else None

    def rolling_refusal(self, chosen: RollingWindow) -> str | None:
        """The reason why no request can have the rolling window ``chosen``, or None."""
        if self.keeps_all:
            return f"this model can't forget tokens: {self.keeps_all}"
        if any(self.kv_windows) or self.num_state_slots:
            return "a model with windows of its own or recurrent states can't forget tokens"
        if chosen.window < 1:
            return f"rolling_window must be at least 1, got {chosen.window}"
        if reason := self.sinks_refusal(chosen.sinks):
            return reason
        most = self.max_model_len - self.block_size
        if chosen.window + chosen.sinks > most:
            return (
                f"rolling_window and sink_tokens are {chosen.window + chosen.sinks} tokens together; the context of "
                f"{self.max_model_len} less a block of {self.block_size} has room for {most}"
            )
        return None

    def sinks_refusal(self, sinks: int) -> str | None:
        """The reason why no rolling window can have ``sinks`` sink tokens, or None."""
        if not 0 <= sinks <= self.block_size:
            return f"sink_tokens must be 0 to {self.block_size}, a block of tokens, got {sinks}"
        if sinks >= self.max_num_batched_tokens:
            most = self.max_num_batched_tokens - 1
            return f"sink_tokens must be at most {most}, as a step has room for, got {sinks}"
        return None

    def rule(self, chosen: RollingWindow | None, num_prompt: int) -> Rolling | None:
        """The rule of forgetting for a request with the rolling window ``chosen``."""
        return Rolling.of(chosen, self.block_size, num_prompt, self.max_model_len) if chosen else None

    def final_length(self, num_prompt: int, max_tokens: int, chosen: RollingWindow | None = None) -> int:
        """The most tokens of a request, prompt and answer, with the rolling window ``chosen``."""
        return min(num_prompt + max_tokens, MOST_TOKENS if chosen else self.max_model_len)

    def blocks_needed(self, num_prompt: int, max_tokens: int, chosen: RollingWindow | None = None) -> int:
        """The most blocks that a request holds at once."""
        need = self.final_length(num_prompt, max_tokens, chosen) - 1  # the last token is never computed
        sinks = 0
        if rule := self.rule(chosen, num_prompt):
            need, sinks = min(need, rule.num_exact), min(rule.sinks, 1)
        return most_blocks(self.kv_windows, need, self.tokens_in_flight, self.block_size) + sinks

    def refusal(self, num_prompt: int, max_tokens: int, chosen: RollingWindow | None = None) -> str | None:
        """The reason why a request with the rolling window ``chosen`` can never be served, or None."""
        if num_prompt < 1:
            return "the prompt is empty"
        if max_tokens < 1:
            return "max_tokens must be at least 1"
        if chosen and (reason := self.rolling_refusal(chosen)):
            return reason
        longest = MOST_TOKENS if chosen else self.max_model_len
        if num_prompt >= longest:
            return f"the prompt has {num_prompt} tokens; the context of {longest} leaves no room to answer"
        if self.blocks_needed(num_prompt, max_tokens, chosen) > self.num_blocks:
            if chosen:
                need = self.blocks_needed(num_prompt, max_tokens, chosen)
                return f"the prompt and the rolling window need {need} blocks of KV cache; there are {self.num_blocks}"
            need, room = self.final_length(num_prompt, max_tokens) - 1, self.room(self.num_blocks)
            return f"the prompt and max_tokens need {need} tokens of KV cache; there are {room}"
        return None

    def room(self, num_blocks: int) -> int:
        """The most tokens of a request in ``num_blocks`` blocks."""
        return most_tokens(self.kv_windows, num_blocks, self.tokens_in_flight, self.block_size)
