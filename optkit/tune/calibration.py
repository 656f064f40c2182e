"""Calibration of an artifact: steps of many shapes through the real runner, and a few requests over HTTP.

``measure_steps`` loads the engine as a server does, takes KV blocks for requests of any length from the KV manager, and
times single steps: prefill chunks of several sizes and contexts, decodes of 1 to ``max_num_seqs`` requests at several
contexts, and both in a step. The content of the KV has no influence on the time, so a context costs nothing to make.
Layers with a window, and recurrent states, are measured without a context.

``overheads`` compares requests to a running server (``ProbeRun``) with the simulation of the same requests: the rest is
HTTP, the process border, and the share of the cores taken from the engine.

The command ``python -m optkit.tune.calibration ARTIFACT`` prints the measured steps as JSON: a calling process stays
small.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optkit.bench.records import RequestRecord
from optkit.bench.servers import end_with_parent
from optkit.bench.workload import BenchRequest
from optkit.errors import UserError
from optkit.simulation.simulator import Overheads, simulate
from optkit.simulation.step_costs import StepCosts, StepShape, step_shape

if TYPE_CHECKING:
    from optkit.runtime.engine import Engine
    from optkit.runtime.scheduling.config import SchedulerConfig

STEP_SECONDS = 4.0  # of measured steps, each time; loading comes on top
CHUNKS = ((16, 0), (64, 0), (64, 1024), (128, 0), (256, 0), (256, 768), (512, 0), (512, 512), (1024, 0))
DECODES = tuple((count, context) for count in (1, 2, 4, 8, 16) for context in (64, 1024))
MIXED = ((256, 4), (128, 8), (512, 2))  # (tokens of a chunk, decodes)
MIXED_CONTEXT = 256
MOST_ROUNDS = 5
LEAST_SHAPES = 8  # measured even if the time is over; the fit has six coefficients

SCALES, FINE_SCALES = (0.5, 0.7, 1.4, 2.0), (0.85, 0.95, 1.05, 1.15)
SMALLEST = {
    "request": 2e-3,
    "prompt_token": 3e-5,
    "step": 5e-4,
    "row": 2e-4,
}  # first tries of an overhead of 0
SPEEDS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)
GAIN = 0.01  # least relative gain of a move

Item = tuple[int, int]  # new tokens, and tokens of context


@dataclass(frozen=True)
class Calibration:
    """The costs of an artifact on the machine at hand; ``seconds`` is the time of the measurements."""

    costs: StepCosts
    overheads: Overheads
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Calibration:
        costs = data["costs"] | {"coefficients": tuple(data["costs"]["coefficients"])}
        return Calibration(StepCosts(**costs), Overheads(**data["overheads"]), data["seconds"])


def shapes(config: SchedulerConfig) -> list[list[Item]]:
    """The steps to measure within the limits of ``config``, cheap steps first."""
    has_context = not any(config.kv_windows) and not config.num_state_slots
    chunks = [(new, context if has_context else 0) for new, context in CHUNKS]
    found: list[list[Item]] = [[chunk] for chunk in dict.fromkeys(chunks)]
    found += [[(1, context if has_context else 0)] * count for count, context in DECODES]
    found += [[(new, 0), *[(1, MIXED_CONTEXT if has_context else 0)] * count] for new, count in MIXED]
    found = [items for index, items in enumerate(found) if items not in found[:index]]
    return sorted(
        (items for items in found if _fits(items, config)),
        key=lambda items: (sum(n for n, _ in items), items),
    )


def _fits(items: Sequence[Item], config: SchedulerConfig) -> bool:
    blocks = sum(config.blocks_needed(new + context, 1) + 1 for new, context in items)
    return (
        len(items) <= config.max_num_seqs
        and sum(new for new, _ in items) <= config.max_num_batched_tokens
        and all(new + context < config.max_model_len for new, context in items)
        and blocks <= config.num_blocks
    )


def measure_steps(engine: Engine, seconds: float = STEP_SECONDS) -> list[tuple[StepShape, float]]:
    """(shape, seconds) of steps on ``engine``, at most ``MOST_ROUNDS`` times each, for about ``seconds``.

    The memory of the KV pool is touched before, and the smallest and the largest step run once unmeasured: the first
    use of memory takes longer than a step. The result has the median of each shape.
    """
    times: dict[int, list[float]] = {}
    made: dict[int, StepShape] = {}
    plans = shapes(engine.config)
    for block in range(engine.config.num_blocks):
        engine.runner.write_block(block, engine.runner.read_block(block))
    for items in (plans[-1], plans[0]):
        measure_step(engine, items)
    end = time.perf_counter() + seconds
    for _ in range(MOST_ROUNDS):
        for number, items in enumerate(plans):
            left, known = end - time.perf_counter(), times.setdefault(number, [])
            if left <= 0 and len(made) >= LEAST_SHAPES:
                continue
            if known and known[-1] > left:
                continue
            made[number], took = measure_step(engine, items)
            known.append(took)
    return [(shape, float(np.median(times[number]))) for number, shape in made.items()]


def measure_step(engine: Engine, items: Sequence[Item]) -> tuple[StepShape, float]:
    """Shape and seconds of a step with ``items``, sampling included. All blocks are free again afterwards.

    Raises:
        ValueError: the KV pool has no room.
    """
    from optkit.runtime.sampling.sampler import sample
    from optkit.runtime.types import Batch, EngineRequest, Request, SamplingParams, ScheduledRequest

    kv = engine.scheduler.kv
    generator = np.random.default_rng(len(items))
    requests: list[Request] = []
    try:
        for number, (new, context) in enumerate(items):
            ids = generator.integers(0, engine.runner.vocab_size, new + context).tolist()
            sampling = SamplingParams(max_tokens=1, temperature=0.0)
            received = EngineRequest(
                request_id=f"calibration-{number}", prompt_ids=tuple(ids), sampling=sampling, arrival=0.0
            )
            request = Request(received, ids)
            if not kv.admit(request, new + context):
                raise ValueError(f"no room for {new + context} tokens")
            requests.append(request)
            request.num_computed = context
        batch = Batch(tuple(ScheduledRequest(r, new) for r, (new, _) in zip(requests, items, strict=True)))
        shape = step_shape(batch.items)
        start = time.perf_counter()
        logits = engine.runner.execute(batch)
        sample(logits, requests)
        return shape, time.perf_counter() - start
    finally:
        for request in requests:
            kv.release(request)


@dataclass(frozen=True)
class ProbeRun:
    """Requests to a running server, and what a client measured.

    ``clients`` without pauses, or requests at their own times where it is None.
    """

    clients: int | None
    requests: Sequence[BenchRequest]
    records: Sequence[RequestRecord]

    def simulated(
        self, config: SchedulerConfig, costs: StepCosts, overheads: Overheads | None = None
    ) -> Sequence[RequestRecord]:
        """The records of the same requests in the simulator."""
        return simulate(config, costs, self.requests, clients=self.clients, overheads=overheads).records

    def levels(self, records: Sequence[RequestRecord]) -> tuple[float, ...]:
        """The numbers to reproduce, in seconds: median TTFT and median time per token.

        For several clients without pauses, median time per token and the length of the run. Their TTFT is left out:
        many answers end in the same step, and the next steps depend on which of the new requests arrives first.
        """
        done = [record for record in records if record.ok and record.tokens > 1]
        if not done:
            raise UserError("no request of the calibration was answered", where="calibration")
        per_token = float(np.median([_tpot(r) for r in done]))
        if self.clients is not None and self.clients > 1:
            ends = [record.done for record in done if record.done is not None]
            return per_token, max(ends) - min(record.send for record in done)
        return float(np.median([_ttft(r) for r in done])), per_token


Probes = Sequence[ProbeRun]


def at_server_speed(config: SchedulerConfig, costs: StepCosts, runs: Probes) -> StepCosts:
    """``costs`` scaled down where the server of ``runs`` is faster than the steps were, without any overhead.

    The machine may have been slower while the steps were measured, and overheads can't be negative.
    """

    def error(factor: float) -> float:
        guess = costs.scaled(factor)
        return _error(config, guess, _lines(config, guess, runs), runs)

    return costs.scaled(min(SPEEDS, key=error))


def _error(config: SchedulerConfig, costs: StepCosts, guess: Overheads, runs: Probes) -> float:
    """Sum of squared relative errors of the simulated ``runs``."""
    total = 0.0
    for run in runs:
        found = run.levels(run.simulated(config, costs, guess))
        total += float(np.sum((np.log(found) - np.log(run.levels(run.records))) ** 2))
    return total


def overheads(config: SchedulerConfig, costs: StepCosts, runs: Probes) -> Overheads:
    """The difference between a server and the engine, from measured runs.

    A pattern search: each of the four overheads in turn is scaled and the runs are simulated again, as long as the
    numbers of ``ProbeRun.levels`` come closer to the measured values, by relative errors. The start are two lines:
    excess time per token over clients, and excess TTFT of a single client over its prompt.
    """
    best = _lines(config, costs, runs)
    least = _error(config, costs, best, runs)
    for factors in (SCALES, SCALES, FINE_SCALES):
        for name, smallest in SMALLEST.items():
            base = getattr(best, name)
            for value in {0.0, smallest, *(factor * base for factor in factors)}:
                guess = replace(best, **{name: value})
                if (rest := _error(config, costs, guess, runs)) < least * (1 - GAIN):
                    best, least = guess, rest
    return best


def _lines(config: SchedulerConfig, costs: StepCosts, runs: Probes) -> Overheads:
    """A first guess: time per token is over the simulation by a + b * clients, TTFT by c + d * prompt tokens."""
    gaps, firsts = list[tuple[float, float]](), list[tuple[float, float]]()
    for run in runs:
        if run.clients is None:
            continue
        known = run.simulated(config, costs)
        pairs = [(a, b) for a, b in zip(run.records, known, strict=True) if a.ok and b.ok]
        excess = [_tpot(a) - _tpot(b) for a, b in pairs if a.tokens > 1]
        if excess:
            gaps.append((float(run.clients), float(np.median(excess))))
        if run.clients == 1:
            firsts += [(float(len(run.requests[a.index].prompt_ids)), _ttft(a) - _ttft(b)) for a, b in pairs]
    step, row = _line(gaps)
    request, prompt_token = _line(_medians(firsts))
    return Overheads(max(request - step - row, 0.0), prompt_token, step, row)


def _tpot(record: RequestRecord) -> float:
    assert record.done is not None and record.first_token is not None
    return (record.done - record.first_token) / (record.tokens - 1)


def _ttft(record: RequestRecord) -> float:
    assert record.first_token is not None
    return record.first_token - record.send


def _medians(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """For each x the median of all y."""
    return [
        (x, float(np.median([y for other, y in points if other == x])))
        for x in sorted({x for x, _ in points})
    ]


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope of the least squares line with neither below 0; zeros without points."""
    if not points:
        return 0.0, 0.0
    x, y = (np.array(values) for values in zip(*points, strict=True))
    best, least = (0.0, 0.0), float(np.sum(y**2))
    options = [(max(float(y.mean()), 0.0), 0.0), (0.0, max(float(x @ y / (x @ x)), 0.0))]
    if len(set(x)) > 1:
        slope, intercept = np.polyfit(x, y, 1)
        if slope >= 0 and intercept >= 0:
            options.append((float(intercept), float(slope)))
    for a, b in options:
        rest = float(np.sum((a + b * x - y) ** 2))
        if rest < least - 1e-18:
            best, least = (a, b), rest
    return best


def steps_in_a_process(
    artifact: Path, options: dict[str, Any], timeout: float
) -> list[tuple[StepShape, float]]:
    """(shape, seconds) of steps of ``artifact``, measured in a child process.

    Raises:
        UserError: the engine does not load, or the time is over.
    """
    command = [sys.executable, "-m", "optkit.tune.calibration", str(artifact), json.dumps(options)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
            check=False,
            preexec_fn=end_with_parent,
        )
    except subprocess.TimeoutExpired as error:
        what = f"calibration did not end within {timeout:.0f} s"
        raise UserError(what, where=str(artifact), fix="give a larger --budget") from error
    if done.returncode:
        text = " ".join(done.stderr.decode(errors="replace").split())[-600:]
        raise UserError(f"calibration failed: {text}", where=str(artifact))
    data = json.loads(done.stdout.decode().splitlines()[-1])
    return [(StepShape(**shape), seconds) for shape, seconds in data]


def main(arguments: Sequence[str]) -> None:
    """Print the measured steps of an artifact as JSON. Arguments: the directory, and engine options as JSON."""
    import torch

    from optkit.runtime.factory import open_engine
    from optkit.runtime.process.worker import cores

    options = json.loads(arguments[1]) if len(arguments) > 1 else {}
    torch.set_num_threads(options.get("threads") or cores())
    found = measure_steps(open_engine(arguments[0], **options))
    sys.stdout.write(json.dumps([[asdict(shape), seconds] for shape, seconds in found]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
