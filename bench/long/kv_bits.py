"""KV in fewer than 8 bits: the loss of quality in transformers, and the most that fewer bytes can save.

    python -m bench.long kv_bits artifact/ --source smollm2-135m
    python -m bench.long kv_bits artifact/ --source smollm2-135m --only time

Each scheme quantizes the blocks of 32 tokens before the block of a query; the query's own block has int8, as in a pool
that packs a full block. ``channel`` is a scale and a zero point for each channel of a block (KIVI, arXiv 2402.02750:
keys have channels of large values), ``token`` for each token and head. KL divergence is from the same model with
float32 KV, over all positions of windows of held-out text.

Time is bounded from below in two ways, at 1,900 tokens of context:

* ``fewer tokens``: the step behind as many tokens as have the same bytes in int8. Products and bytes both shrink, and
  unpacking is free. No kernel can be faster.
* ``same products``: the int8 step, less the saved share of what reading KV costs. This cost is the step less the same
  step with a block table that repeats one block, which stays in the first-level cache. No instruction multiplies less
  than 8 bits, so a kernel of few bits has the same products, and unpacking comes on top.

Exit code 1: no scheme has a KL divergence of at most ``MOST_KL`` with at most ``MOST_RATIO`` of the time by both.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.figures import command_line
from bench.long._answers import load
from bench.long._few_bits import INT8, SCHEMES, Quality, qualities
from optkit.bench.environment import environment
from optkit.checkpoint.locate import resolve
from optkit.errors import UserError
from optkit.evaluation.quality import Estimate, evaluation_windows, mean_estimate
from optkit.kernels.kv_rows import KV_SCALE_BYTES
from optkit.runtime.engine import Engine
from optkit.runtime.factory import open_engine
from optkit.runtime.runner import ModelRunner
from optkit.runtime.types import Batch, EngineRequest, Request, SamplingParams, ScheduledRequest
from optkit.text.load import load_tokenizer

CONTEXT = 1900
MOST_KL, MOST_RATIO = 0.005, 0.95
STEPS, ROUNDS = 24, 8


@dataclass(frozen=True)
class Times:
    """Seconds in each round: of a step of the engine by length of the context, and of reading KV in a step."""

    steps: Mapping[int, Sequence[float]]
    reading: Sequence[float]

    def fewer_tokens(self, share: float) -> Estimate:
        """The step behind ``share`` of the tokens, as a share of the step behind all."""
        return over_rounds(a / b for a, b in zip(self.steps[tokens(share)], self.steps[CONTEXT], strict=True))

    def same_products(self, share: float) -> Estimate:
        """The step with ``share`` of the bytes and all products, as a share of the step."""
        step = statistics.median(self.steps[CONTEXT])
        return over_rounds(1 - (1 - share) * reading / step for reading in self.reading)


def over_rounds(values: Iterable[float]) -> Estimate:
    """Mean and standard error."""
    return mean_estimate([torch.tensor(list(values), dtype=torch.float64)])


def tokens(share: float) -> int:
    """Tokens with ``share`` of the bytes of ``CONTEXT`` tokens."""
    return round(CONTEXT * share)


def ids(length: int) -> list[int]:
    return [(7 * i) % 30_000 + 100 for i in range(length)]


def step_seconds(engine: Engine, lengths: Sequence[int]) -> dict[int, list[float]]:
    """The time of a decode step behind each of ``lengths`` tokens: the mean of each round, in turn."""
    times: dict[int, list[float]] = {length: [] for length in lengths}
    params = SamplingParams(max_tokens=STEPS, temperature=0.0)
    for number in range(ROUNDS):
        for length in lengths[:: 1 if number % 2 == 0 else -1]:
            prompt, name = tuple(ids(length - STEPS // 2)), f"{number}-{length}"
            engine.add_request(
                EngineRequest(request_id=name, prompt_ids=prompt, sampling=params, arrival=time.monotonic())
            )
            while not engine.step():
                pass
            tokens, start = 0, time.perf_counter()
            while engine.has_work:  # a call may run several steps
                tokens += sum(len(output.token_ids) for output in engine.step())
            times[length].append((time.perf_counter() - start) / tokens)
    return times


def reading_seconds(engine: Engine) -> list[float]:
    """The step behind ``CONTEXT`` tokens less the same step with one block in every place of the block table.

    The engine's KV is overwritten. The median of each round.
    """
    size, runner = engine.config.block_size, engine.runner
    blocks = -(-CONTEXT // size)
    received = EngineRequest(request_id="", prompt_ids=(), sampling=SamplingParams(max_tokens=1), arrival=0.0)
    apart, same = (
        Request(received, ids(CONTEXT), block_tables=[table]) for table in ([*range(blocks)], [0] * blocks)
    )
    runner.execute(Batch((ScheduledRequest(apart, CONTEXT),)))  # all blocks hold KV
    apart.num_computed = same.num_computed = CONTEXT - 1

    def seconds(request: Request) -> float:
        start = time.perf_counter()
        runner.execute(Batch((ScheduledRequest(request, 1),)))
        return time.perf_counter() - start

    return [
        statistics.median(seconds(apart) - seconds(same) for _ in range(2 * STEPS)) for _ in range(ROUNDS)
    ]


def shares(dim: int) -> dict[str, float]:
    """Bytes of each scheme as a share of those of int8."""
    return {scheme.name: scheme.token_bytes(dim) / (2 * (dim + KV_SCALE_BYTES)) for scheme in SCHEMES}


def measured(engine: Engine, lengths: Iterable[int]) -> Times:
    """The times behind ``CONTEXT`` and behind ``lengths`` tokens."""
    return Times(step_seconds(engine, sorted({CONTEXT, *lengths})), reading_seconds(engine))


@dataclass(frozen=True)
class Row:
    """A scheme: bytes and both least times as shares of those of int8, and quality; None where not measured."""

    bytes: float | None = None
    quality: Quality | None = None
    fewer_tokens: Estimate | None = None
    same_products: Estimate | None = None

    @property
    def promises(self) -> bool:
        """True where no measured figure is beyond a bound."""
        times = [each.value for each in (self.fewer_tokens, self.same_products) if each]
        return max(times, default=0.0) <= MOST_RATIO and (
            self.quality is None or self.quality.kl.value <= MOST_KL
        )


def head_dim(engine: Engine, artifact: str) -> int:
    """The channels of a key.

    Raises:
        UserError: the artifact's KV is not int8.
    """
    runner = engine.runner
    if runner.kv_dtype != "int8":
        raise UserError(f"the KV cache is {runner.kv_dtype}", where=artifact, fix="use a recipe with kv_int8")
    if not isinstance(runner, ModelRunner):
        raise SystemExit("the engine has no model in this process")
    return runner.model.kv_specs[0].head_dim


def main(arguments: Sequence[str]) -> int:
    parser = command_line("bench.long kv_bits", __doc__)
    parser.add_argument("artifact", help="with int8 KV")
    parser.add_argument("--source", default="smollm2-135m", help="the model of the artifact")
    parser.add_argument("--windows", type=int, default=4, help="of held-out text (default: %(default)s)")
    parser.add_argument("--only", choices=("quality", "time"), help="one half of the table")
    parser.add_argument("--save-result", type=Path)
    args = parser.parse_args(arguments)
    rows = {scheme.name: Row() for scheme in SCHEMES}
    result: dict[str, Any] = {"kind": "kv-bits", "environment": environment()}
    if args.only != "quality":
        engine = open_engine(args.artifact, speculative_model="none")
        kept = shares(head_dim(engine, args.artifact))
        times = measured(engine, map(tokens, kept.values()))
        result["times"] = asdict(times)
        print(f"step at {CONTEXT} tokens: {1e3 * statistics.median(times.steps[CONTEXT]):.2f} ms")
        print(f"of these the reading of KV: {1e3 * statistics.median(times.reading):.3f} ms")
        for name, share in kept.items():
            few, same = times.fewer_tokens(share), times.same_products(share)
            rows[name] = Row(bytes=share, fewer_tokens=few, same_products=same)
    if args.only != "time":
        directory = resolve(args.source).directory
        windows = evaluation_windows(load_tokenizer(str(directory)), args.windows * CONTEXT, CONTEXT)
        found = qualities(directory, windows)
        rows = {INT8: Row()} | rows
        rows = {name: replace(row, quality=found[name]) for name, row in rows.items()}
    show(rows)
    print(load())
    promising = [name for name, row in rows.items() if name != INT8 and row.promises]
    print("within all bounds: " + (", ".join(promising) or "none"))
    if args.save_result:
        result["rows"] = {name: asdict(row) for name, row in rows.items()}
        args.save_result.write_text(json.dumps(result) + "\n")
    return 0 if promising else 1


def show(rows: Mapping[str, Row]) -> None:
    """Print a row for each scheme."""
    print(
        f"{'scheme':28} {'bytes':>6} {'KL, nats':>17} {'agreement':>9} {'fewer tokens':>15} {'same products':>15}"
    )
    for name, row in rows.items():
        quality = (
            f"{row.quality.kl.value:8.5f} ± {row.quality.kl.stderr:.5f} {row.quality.agreement.value:9.2%}"
            if row.quality
            else f"{'':27}"
        )
        times = [
            f"{each.value:7.3f} ± {each.stderr:.3f}" if each else f"{'':15}"
            for each in (row.fewer_tokens, row.same_products)
        ]
        size = f"{row.bytes:5.2f}x" if row.bytes else f"{'':6}"
        print(f"{name:28} {size} {quality} {' '.join(times)}")
