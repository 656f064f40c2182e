"""The requests of a benchmark: prompts of an exact length, with their send times.

Prompts are token ids cut from the shipped evaluation text, exactly ``input_len`` long on every side. Real language
gives realistic tokens to speculative decoding and early exits. Each prompt starts with a different word: no two
prompts share even the first block, so a prefix cache cannot help. Rounds use different prompts for the same reason.
The seed decides all prompts and arrivals: both sides get the same ids at the same offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from optkit.errors import UserError


class Encoder(Protocol):
    def __call__(self, text: str, add_special_tokens: bool = ...) -> Any: ...


@dataclass(frozen=True)
class WorkloadConfig:
    """Number, lengths and arrivals of the requests.

    ``request_rate`` None is a closed loop: ``max_concurrency`` clients without pauses. With a rate (requests/s)
    arrivals are a Poisson process, an open loop; ``max_concurrency`` then bounds the requests in flight, and None
    means no bound.
    """

    num_prompts: int = 16
    input_len: int = 512
    output_len: int = 64
    max_concurrency: int | None = 1
    request_rate: float | None = None
    seed: int = 0

    def check(self) -> None:
        for name in ("num_prompts", "input_len", "output_len", "max_concurrency", "request_rate"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserError(f"{name} must be positive, not {value}", where="workload")
        if self.request_rate is None and self.max_concurrency is None:
            raise UserError(
                "neither a request rate nor a concurrency", where="workload", fix="give one of them"
            )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class BenchRequest:
    """A prompt and its send time, in seconds after the start of the run."""

    index: int
    prompt_ids: tuple[int, ...]
    output_len: int
    arrival: float


@dataclass(frozen=True)
class RequestSchedule:
    config: WorkloadConfig
    requests: tuple[BenchRequest, ...]


def text_ids(tokenizer: Encoder) -> list[int]:
    """The shipped evaluation text as token ids, without special tokens."""
    from optkit.text.corpora import load_text

    return list(tokenizer(load_text("evaluation"), add_special_tokens=False).input_ids)


def build(config: WorkloadConfig, ids: Sequence[int], round_: int = 0) -> RequestSchedule:
    """The workload of a round. Rounds differ in prompts; sides of a round do not.

    Args:
        config: lengths, count, arrivals, seed.
        ids: tokens to cut prompts from (``text_ids``).
        round_: number of the round, from 0.

    Raises:
        UserError: a number is not positive, or the text is too short.
    """
    config.check()
    prompts = _prompts(config, ids, round_)
    arrivals = _arrivals(config, round_)
    rows = zip(prompts, arrivals, strict=True)
    requests = tuple(BenchRequest(i, prompt, config.output_len, at) for i, (prompt, at) in enumerate(rows))
    return RequestSchedule(config, requests)


def _prompts(config: WorkloadConfig, ids: Sequence[int], round_: int) -> list[tuple[int, ...]]:
    """Slices at random places, each with a leading token unique among all prompts of all rounds.

    The leading tokens are distinct tokens of the text, in an order given by the seed alone.
    """
    if len(ids) < config.input_len:
        raise UserError(
            f"the text has {len(ids)} tokens, a prompt needs {config.input_len}", where="input_len"
        )
    leads = np.random.default_rng(config.seed).permutation(np.unique(np.asarray(ids)))
    first = round_ * config.num_prompts
    if first + config.num_prompts > len(leads):
        raise UserError(
            f"only {len(leads)} distinct prompts can be made", where="num_prompts", fix="ask for fewer"
        )
    places = np.random.default_rng([config.seed, round_, 1]).integers(
        0, len(ids) - config.input_len + 1, config.num_prompts
    )
    return [
        (int(lead), *ids[place + 1 : place + config.input_len])
        for lead, place in zip(leads[first : first + config.num_prompts], places, strict=True)
    ]


def _arrivals(config: WorkloadConfig, round_: int) -> list[float]:
    """Seconds after the start: exponential gaps at ``request_rate``, or all 0 in a closed loop."""
    if config.request_rate is None:
        return [0.0] * config.num_prompts
    generator = np.random.default_rng([config.seed, round_, 2])
    gaps = generator.exponential(1 / config.request_rate, config.num_prompts)
    return [float(at) for at in gaps.cumsum() - gaps[0]]
