"""The requests of a benchmark: prompts of an exact length, with their send times.

Prompts are token ids cut from the shipped evaluation text, of the same length on every side. By default no two
prompts share even the first block, so a prefix cache cannot help, and rounds use different prompts for the same
reason. Shared prefixes, conversations and traces share exactly what they describe (``optkit.bench.prompts``). The seed
decides all prompts and arrivals: all sides get the same ids at the same offsets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from optkit.bench.arrivals import arrivals, at_rate
from optkit.bench.prompts import Prompt, PromptSource, of_trace, with_prefixes
from optkit.bench.traces import TraceRow, read_trace
from optkit.errors import UserError

POSITIVE = (
    *("num_prompts", "input_len", "output_len", "max_concurrency", "request_rate"),
    *("burstiness", "num_prefixes", "turns", "trace_scale"),
)


class Encoder(Protocol):
    def __call__(self, text: str, add_special_tokens: bool = ...) -> Any: ...


@dataclass(frozen=True)
class WorkloadConfig:
    """Number, lengths and arrivals of the requests.

    ``request_rate`` None is a closed loop: ``max_concurrency`` clients without pauses. With a rate (requests/s)
    arrivals are a gamma process with shape ``burstiness``, an open loop (1: Poisson); ``max_concurrency`` then bounds
    the requests in flight, and None means no bound. An infinite rate sends all at once.

    Attributes:
        num_prompts: requests of a round; with ``turns``, all turns of all conversations.
        input_len: tokens of a prompt after its shared prefix; with ``turns``, of each message of the user.
        shared_prefix_len: tokens that prompts have in common, before ``input_len`` further tokens.
        num_prefixes: different shared prefixes; taken in turn.
        turns: requests of a conversation. Each turn sends the whole history; the answers in the history are text of
            ``output_len`` tokens, the same on every side, and not the model's.
        trace: file with arrivals, lengths and prefixes, in place of all of the above but ``num_prompts``.
        trace_scale: factor on the trace's lengths, as in 1/32.
    """

    num_prompts: int = 16
    input_len: int = 512
    output_len: int = 64
    max_concurrency: int | None = 1
    request_rate: float | None = None
    seed: int = 0
    burstiness: float = 1.0
    shared_prefix_len: int = 0
    num_prefixes: int = 1
    turns: int = 1
    trace: str | None = None
    trace_scale: float = 1.0

    @property
    def shares_prefixes(self) -> bool:
        """True where prompts have prefixes in common, so hits of a prefix cache are expected."""
        return bool(self.shared_prefix_len or self.turns > 1 or self.trace)

    @property
    def open_loop(self) -> bool:
        """True where arrivals do not wait for answers."""
        return math.isfinite(self.request_rate) if self.request_rate is not None else self.trace is not None

    def check(self) -> None:
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and not (
                0 < value < math.inf or (name == "request_rate" and value == math.inf)
            ):
                raise UserError(
                    f"{name} must be positive, not {value}", where="workload", fix="give a number above 0"
                )
        if self.shared_prefix_len < 0:
            raise UserError(
                f"shared_prefix_len must not be negative: {self.shared_prefix_len}",
                where="workload",
                fix="give 0 or more",
            )
        if self.seed < 0:
            raise UserError(f"seed must not be negative: {self.seed}", where="workload", fix="give 0 or more")
        if self.request_rate is None and self.max_concurrency is None and not self.trace:
            raise UserError(
                "neither a request rate nor a concurrency", where="workload", fix="give one of them"
            )
        for problem, fix in self._contradictions():
            raise UserError(problem, where="workload", fix=fix)

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        """Options that would be without effect, each with what to do."""
        if self.num_prompts % self.turns:
            whole = -(-self.num_prompts // self.turns) * self.turns
            yield (
                f"{self.num_prompts} requests are no whole number of conversations of {self.turns} turns",
                f"--num-prompts {whole}",
            )
        if self.num_prefixes > 1 and not self.shared_prefix_len:
            yield "prefixes without a length", "add --shared-prefix-len"
        if self.burstiness != 1 and (self.request_rate is None or self.trace):
            yield "burstiness shapes the arrivals of a request rate", "add --request-rate, without a trace"
        if self.trace and (self.turns > 1 or self.shared_prefix_len):
            yield "a trace brings its own prefixes and turns", "leave out --turns and --shared-prefix-len"
        if self.trace_scale != 1 and not self.trace:
            yield "a scale without a trace", "add --trace FILE"

    def at_rate(self, rate: float) -> WorkloadConfig:
        """The same requests in an open loop at ``rate``: the same arrivals, faster or slower."""
        return replace(self, request_rate=rate, max_concurrency=None)

    def closed(self, concurrency: int | None) -> WorkloadConfig:
        """The same requests without arrival times: ``concurrency`` at a time, or all at once."""
        return replace(self, request_rate=math.inf, max_concurrency=concurrency, burstiness=1.0)

    def to_dict(self) -> dict[str, Any]:
        """JSON data; an infinite rate is the text ``inf``."""
        return asdict(self) | ({"request_rate": "inf"} if self.request_rate == math.inf else {})

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> WorkloadConfig:
        rate = data["request_rate"]
        return cls(**{**data, "request_rate": None if rate is None else float(rate)})


@dataclass(frozen=True)
class BenchRequest:
    """A prompt and its send time, in seconds after the start of the run.

    ``after`` is the index of the request whose end is waited for: the turn before in a conversation.
    """

    index: int
    prompt_ids: tuple[int, ...]
    output_len: int
    arrival: float
    after: int | None = None


@dataclass(frozen=True)
class RequestSchedule:
    config: WorkloadConfig
    requests: tuple[BenchRequest, ...]


def text_ids(tokenizer: Encoder) -> list[int]:
    """The shipped evaluation text as token ids, without special tokens."""
    from optkit.text.corpora import load_text

    return list(tokenizer(load_text("evaluation"), add_special_tokens=False).input_ids)


def build(
    config: WorkloadConfig, ids: Sequence[int], round_: int = 0, arrival_round: int | None = None
) -> RequestSchedule:
    """The workload of a round. Rounds differ in prompts; sides of a round do not.

    Args:
        config: lengths, count, arrivals, seed.
        ids: tokens to cut prompts from (``text_ids``).
        round_: number of the round, from 0.
        arrival_round: the round with the arrivals, for the same arrivals with fresh prompts; by default ``round_``.

    Raises:
        UserError: a number is not positive, options contradict each other, the text is too short, or the trace can't
            be read.
    """
    config.check()
    source = PromptSource(ids, config.seed, round_)
    starts = _arrivals(config, round_ if arrival_round is None else arrival_round)
    if config.trace:
        requests = _traced(config, source, read_trace(config.trace, config.num_prompts))
    elif config.turns > 1:
        requests = _conversations(config, source, starts)
    else:
        prompts = with_prefixes(
            source, config.num_prompts, config.input_len, config.shared_prefix_len, config.num_prefixes
        )
        rows = zip(prompts, starts, strict=True)
        requests = [BenchRequest(i, prompt, config.output_len, at) for i, (prompt, at) in enumerate(rows)]
    return RequestSchedule(config, tuple(requests))


def _arrivals(config: WorkloadConfig, round_: int) -> list[float]:
    """The start of each conversation; a conversation brings ``turns`` requests, so fewer start a second."""
    rate = None if config.request_rate is None else config.request_rate / config.turns
    return arrivals(config.num_prompts // config.turns, rate, config.burstiness, [config.seed, round_, 2])


def _traced(config: WorkloadConfig, source: PromptSource, rows: Sequence[TraceRow]) -> list[BenchRequest]:
    """The requests of a trace, at its own times or at ``request_rate``."""
    times = at_rate([row.at for row in rows], config.request_rate)
    prompts = of_trace(source, rows, config.trace_scale)
    return [
        BenchRequest(i, prompt, row.scaled(config.trace_scale).output_len, at)
        for i, (row, prompt, at) in enumerate(zip(rows, prompts, times, strict=True))
    ]


def _conversations(
    config: WorkloadConfig, source: PromptSource, starts: Sequence[float]
) -> list[BenchRequest]:
    """Conversations one after the other; each turn's prompt begins with the prompt of the turn before."""
    step = config.input_len + config.output_len
    length = (config.turns - 1) * step + config.input_len
    histories = with_prefixes(source, len(starts), length, config.shared_prefix_len, config.num_prefixes)
    requests: list[BenchRequest] = []
    for history, start in zip(histories, starts, strict=True):
        for turn in range(config.turns):
            index = len(requests)
            prompt: Prompt = history[: len(history) - (config.turns - 1 - turn) * step]
            after = index - 1 if turn else None
            requests.append(BenchRequest(index, prompt, config.output_len, start, after))
    return requests
