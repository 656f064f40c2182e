"""The limits of the scheduler, and what they exclude. Plain numbers: the API process asks ``refusal`` too."""

from __future__ import annotations

from dataclasses import dataclass

from optkit.runtime.scheduling.policy import POLICIES

LIMITS = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "num_blocks")


@dataclass(frozen=True)
class SchedulerConfig:
    """The limits of a step and of the KV pool, and how to choose within them.

    Attributes:
        policy: one of ``POLICIES``.
        ttft_slo, tpot_slo: promised seconds to the first token and per output token; None promises nothing.
        enforce_ttft_slo: refuse a request whose first token is predicted to be late.
        queue_timeout: seconds after its arrival at which a request that has not begun is given up; None: never.
        prefill_target_tokens: a step with so many prompt tokens takes no further prompt. About where the machine's
            matrix products reach full speed; 0 is ``max_num_batched_tokens``.
        enable_prefix_caching: keep KV of finished and preempted sequences for those that begin alike.
        num_offload_slots: blocks that the offload store holds; needs the prefix cache.
        form_limits: the most tokens of each form of the layers but the last; empty where they have one form.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    policy: str = "fcfs"
    ttft_slo: float | None = None
    tpot_slo: float | None = None
    enforce_ttft_slo: bool = False
    queue_timeout: float | None = None
    prefill_target_tokens: int = 0
    enable_prefix_caching: bool = True
    num_offload_slots: int = 0
    form_limits: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in LIMITS:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}), so that every running sequence can decode in each step"
            )
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {self.policy!r}")
        if self.num_offload_slots and not self.enable_prefix_caching:
            raise ValueError(
                "num_offload_slots needs enable_prefix_caching: it keeps what the prefix cache evicts"
            )
        if self.enforce_ttft_slo and not self.ttft_slo:
            raise ValueError("enforce_ttft_slo needs a ttft_slo")

    @property
    def few_tokens(self) -> int:
        """The most tokens of a step whose layers may have another form than that for many; 0: there is none."""
        return max(self.form_limits, default=0)

    @property
    def prefill_target(self) -> int:
        return self.prefill_target_tokens or self.max_num_batched_tokens

    def final_length(self, num_prompt: int, max_tokens: int) -> int:
        """The most tokens the sequence can reach."""
        return min(num_prompt + max_tokens, self.max_model_len)

    def refusal(self, num_prompt: int, max_tokens: int) -> str | None:
        """Why such a request can never be served, or None. Pure, so that the API process asks it too."""
        if num_prompt < 1:
            return "the prompt is empty"
        if max_tokens < 1:
            return "max_tokens must be at least 1"
        if num_prompt >= self.max_model_len:
            return f"the prompt has {num_prompt} tokens; the context of {self.max_model_len} leaves no room to answer"
        need = self.final_length(num_prompt, max_tokens) - 1  # the last token is never computed
        room = self.num_blocks * self.block_size
        if need > room:
            return f"the prompt and max_tokens need {need} tokens of KV cache; there are {room}"
        return None
