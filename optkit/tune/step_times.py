"""Times of single steps of an artifact, of many shapes through the real runner.

``measure_steps`` takes KV blocks for requests of any length from the KV manager of a loaded engine, and times single
steps: prefill chunks of several sizes and contexts, decodes of 1 to ``max_num_seqs`` requests at several contexts, and
both in a step. The content of the KV has no influence on the time, so a context costs nothing to make. Layers with a
window, and recurrent states, are measured without a context.

``python -m optkit.tune.step_times ARTIFACT`` loads the artifact and, for each line of its input, prints steps measured
anew as a line of JSON: a calling process stays small (``step_process``).
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optkit.errors import UserError
from optkit.machine.parent import end_with_parent
from optkit.machine.torch_threads import wait_shortly
from optkit.simulation.step_costs import MeasuredStep, StepShape, step_shape

if TYPE_CHECKING:
    from optkit.runtime.engine import Engine
    from optkit.runtime.scheduling.config import SchedulerConfig

STEP_SECONDS = 3.0  # of measured steps, each time; loading comes on top
CHUNKS = ((16, 0), (64, 0), (64, 1024), (128, 0), (256, 0), (256, 768), (512, 0), (512, 512), (1024, 0))
DECODES = tuple((count, context) for count in (1, 2, 4, 8, 16) for context in (64, 1024))
MIXED = ((256, 4), (128, 8), (512, 2))  # (tokens of a chunk, decodes)
MIXED_CONTEXT = 256
MOST_ROUNDS = 5
END_SECONDS = 5.0  # for a process to end by itself
LEAST_SHAPES = 8  # measured even if the time is over; the fit has six coefficients

Item = tuple[int, int]  # new tokens, and tokens of context


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


def measure_steps(engine: Engine, seconds: float = STEP_SECONDS) -> list[MeasuredStep]:
    """Steps on ``engine``, one after the other, for about ``seconds``.

    At most ``MOST_ROUNDS`` of a shape. The memory of the KV pool is touched before, and the smallest and the largest
    step run once unmeasured: the first use of memory takes longer than a step.
    """
    found: list[MeasuredStep] = []
    last: dict[int, float] = {}  # seconds, by place in the plans
    plans = shapes(engine.config)
    for block in range(engine.config.num_blocks):
        engine.runner.write_block(block, engine.runner.read_block(block))
    for items in (plans[-1], plans[0]):
        measure_step(engine, items)
    end = time.perf_counter() + seconds
    for _ in range(MOST_ROUNDS):
        for number, items in enumerate(plans):
            left = end - time.perf_counter()
            if (left <= 0 and len(last) >= LEAST_SHAPES) or last.get(number, 0.0) > max(left, 0.0):
                continue
            found.append(measure_step(engine, items))
            last[number] = found[-1].seconds
    return found


def measure_step(engine: Engine, items: Sequence[Item]) -> MeasuredStep:
    """A step with ``items``, sampling included. All blocks are free again afterwards.

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
        start = time.monotonic()
        logits = engine.runner.execute(batch)
        sample(logits, requests)
        return MeasuredStep(shape, time.monotonic() - start, start)
    finally:
        for request in requests:
            kv.release(request)


def steps_in_a_process(artifact: Path, options: dict[str, Any], timeout: float) -> list[MeasuredStep]:
    """Steps of ``artifact``, measured once in a child process (``step_process``).

    Raises:
        UserError: the engine does not load, or the time is over.
    """
    with step_process(artifact, options, timeout) as measure:
        return measure()


@contextmanager
def step_process(
    artifact: Path, options: dict[str, Any], timeout: float
) -> Iterator[Callable[[], list[MeasuredStep]]]:
    """A context with a child process that loads ``artifact``; each call of the value measures steps there.

    The first call waits for the end of loading, too. A call takes up to ``timeout`` seconds.

    Raises:
        UserError: by a call: the engine does not load, or the time is over.
    """
    command = [sys.executable, "-m", "optkit.tune.step_times", str(artifact), json.dumps(options)]
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=errors, preexec_fn=end_with_parent
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        questions, answers = process.stdin.fileno(), process.stdout

        def measure() -> list[MeasuredStep]:
            with suppress(BrokenPipeError):  # of an ended process, whose answer is the end of the file
                os.write(questions, b"\n")
            if not select.select([answers], [], [], timeout)[0]:
                what = f"calibration did not end within {timeout:.0f} s"
                raise UserError(what, where=str(artifact), fix="give a larger --budget")
            line = answers.readline()
            if not line.endswith(b"\n"):
                errors.seek(0)
                text = " ".join(errors.read().decode(errors="replace").split())[-600:]
                what = f"calibration failed with exit code {process.wait()}: {text}"
                raise UserError(what, where=str(artifact))
            rows = json.loads(line)
            return [MeasuredStep(StepShape(**shape), seconds, start) for shape, seconds, start in rows]

        try:
            yield measure
            process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
        finally:
            process.kill()


def main(arguments: Sequence[str]) -> None:
    """For each line of the standard input, print measured steps of an artifact as a line of JSON.

    Arguments: the directory of the artifact, and engine options as JSON.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    wait_shortly()
    import torch

    from optkit.machine.target import usable_cores
    from optkit.runtime.factory import open_engine

    options = json.loads(arguments[1]) if len(arguments) > 1 else {}
    torch.set_num_threads(options.get("threads") or usable_cores())
    engine = open_engine(arguments[0], **options)
    for _ in sys.stdin:
        found = measure_steps(engine)
        answers.write(json.dumps([[asdict(step.shape), step.seconds, step.start] for step in found]) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
