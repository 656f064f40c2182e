"""The cost and the truth of profiles: recorded against plain steps, and other profilers on the same steps.

    python -m bench.profiling artifact/
    python -m bench.profiling artifact/ --check perf --threads 1
    python -m bench.profiling baseline/ --check torch

*Overhead*: steps of an engine in pairs, recorded and plain in random order, timed by a clock around the step. The
result is the median of the ratios with a 95 % interval (a bootstrap over pairs). *Parts*: the share of a
recorded step in ops and named parts, in the median. The least share is shown, too: another process on the core may take
time between two ops.

``--check torch`` compares the time of matrix products and of the whole step with torch's profiler in the same
prefill. torch's profiler sees ops of torch alone, so the artifact must run ops of torch: recipe ``baseline``.
``--check perf`` compares the share of matrix products in decode steps with samples of Linux' ``perf`` (cpu-clock).
Shares are comparable with a single thread. Exit code 1 if a bound is missed.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.figures import command_line
from optkit.artifact.open import Artifact
from optkit.evaluation.profiled import generate, options_for
from optkit.machine.present import present_target
from optkit.profiling.observer import NoObserver
from optkit.profiling.recording import DECODE, MOST_STEPS, PREFILL, Recording
from optkit.profiling.report import PhaseReport, make_report
from optkit.profiling.timeline import timelines
from optkit.runtime.engine import Engine
from optkit.runtime.factory import load_engine

OVERHEAD = {PREFILL: 0.01, DECODE: 0.02}
PARTS, AGREEMENT = 0.95, 0.05
PERF_SECONDS, PERF_RATE = 20.0, 1997
ANSWER_TOKENS, SPACING = 200, 31  # every so many decode steps one is recorded, at all lengths in turn
KERNELS = re.compile(r"Linear|linear_|Panel|panel|grouped_tile|widened")  # demangled symbols of products
MOST_SYMBOLS = 15  # in the output, for a check by eye
PRODUCTS = ("linear", "expert", "head_linear")  # ops


class Steps:
    """Steps of ``engine``, timed from outside."""

    def __init__(self, engine: Engine, steps: int = MOST_STEPS) -> None:
        self.engine = engine
        self.recording = Recording(engine.runner.model, engine.config.max_num_batched_tokens, steps)  # type: ignore[attr-defined]
        self.plain_step = engine.step
        self.on: Callable[[], bool] = lambda: False
        self.taken: list[tuple[bool, int, float]] = []  # recorded or not, tokens, seconds
        engine.step = self.step  # type: ignore[method-assign]

    def step(self) -> Any:
        on = self.on()
        self.engine.observer = self.recording if on else NoObserver()
        start = time.perf_counter()
        outputs = self.plain_step()
        seconds = time.perf_counter() - start
        self.taken.append((on, len(outputs), seconds))
        return outputs

    def close(self) -> None:
        self.recording.close()
        self.engine.observer, self.engine.step = NoObserver(), self.plain_step  # type: ignore[method-assign]


def in_pairs(seed: int = 0) -> Iterator[bool]:
    """True and False in pairs of random order."""
    order = random.Random(seed)
    while True:
        first = order.random() < 0.5
        yield from (first, not first)


def ratio(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """The median of recorded / plain with its 95 % interval, less one."""
    logs = [math.log(on / off) for on, off in pairs]
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(logs, k=len(logs))) for _ in range(1000))
    return tuple(math.expm1(value) for value in (statistics.median(logs), medians[25], medians[974]))  # type: ignore[return-value]


def overhead(engine: Engine, phase: str, tokens: int, pairs: int) -> dict[str, Any]:
    """The overhead of records in steps of ``phase``."""
    steps, found = Steps(engine, pairs), list[tuple[bool, float]]()
    switch = in_pairs()
    try:
        if phase == PREFILL:
            for number in range(2 * pairs):
                on = next(switch)
                steps.taken.clear()
                steps.on = lambda on=on: on  # type: ignore[misc]
                generate(engine, tokens, 100 + number)
                found.append((on, steps.taken[0][2]))
        else:
            generate(engine, tokens, 99, answer=3)
            steps.taken.clear()
            prefilled: list[bool] = []

            def on() -> bool:  # the prompt is not recorded
                if not prefilled:
                    prefilled.append(True)
                    return False
                return next(switch)

            steps.on = on
            generate(engine, tokens, 98, answer=2 * pairs + 1)
            found = [(each, seconds) for each, _, seconds in steps.taken[1:]]
    finally:
        steps.close()
    both = [found[i : i + 2] for i in range(0, len(found) - 1, 2)]
    middle, low, high = ratio([(dict(pair)[True], dict(pair)[False]) for pair in both])
    result = steps.recording.result()
    shares = [each.accounted for each in timelines(result) if each.step.phase == phase]
    plain = statistics.median(seconds for each, seconds in found if not each)
    return {
        "phase": phase,
        "pairs": len(both),
        "plain_ms": plain * 1e3,
        "overhead": middle,
        "interval": [low, high],
        "parts": statistics.median(shares),
        "least_parts": min(shares),
        "ok": middle <= OVERHEAD[phase] and statistics.median(shares) >= PARTS,
    }


def products(phase: PhaseReport) -> float:
    """Seconds of matrix products in a step."""
    return sum(row.seconds for row in phase.rows if row.op.startswith(PRODUCTS))


def against_torch(engine: Engine, artifact: Artifact, tokens: int) -> dict[str, Any]:
    """Matrix products and the step by torch's profiler and by records, in the same prefill."""
    from torch.profiler import ProfilerActivity, profile, record_function

    steps = Steps(engine, 1)
    try:
        steps.on = lambda: True
        plain = steps.plain_step

        def marked() -> Any:
            with record_function("whole step"):
                return plain()

        steps.plain_step = marked
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            generate(engine, tokens, 50)
    finally:
        steps.plain_step = plain
        steps.close()
    report = make_report(artifact.name, steps.recording.result(), artifact.graph(), present_target("cpu"))
    events = {event.key: event for event in profiler.key_averages()}
    linear = ("aten::linear", "mkldnn::_linear_pointwise")  # large float layers of CPUs that are not Intel's
    theirs = sum(events[key].cpu_time_total for key in linear if key in events) / 1e6
    if not theirs:
        theirs = sum(e.cpu_time_total for k, e in events.items() if "linear" in k) / 1e6
    phase = report.phases[0]
    whole = events["whole step"].cpu_time_total / 1e6
    return compared("torch", phase.seconds, whole, products(phase), theirs)


def compared(name: str, step: float, their_step: float, own: float, theirs: float) -> dict[str, Any]:
    differences = {"step": step / their_step - 1, "products": own / theirs - 1}
    return {
        "check": name,
        "step_ms": [step * 1e3, their_step * 1e3],
        "products_ms": [own * 1e3, theirs * 1e3],
        "differences": differences,
        "ok": all(abs(value) <= AGREEMENT for value in differences.values()),
    }


def against_perf(engine: Engine, artifact: Artifact, tokens: int) -> dict[str, Any]:
    """The share of matrix products in decode steps, by samples and by records."""
    if shutil.which("perf") is None:
        raise SystemExit("there is no perf on PATH")
    steps = Steps(engine, MOST_STEPS)
    counter = itertools.count()
    steps.on = lambda: next(counter) % SPACING == 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "perf.data"
        command = [
            "perf",
            "record",
            "-q",
            "-e",
            "cpu-clock",
            "-F",
            str(PERF_RATE),
            "-p",
            str(os.getpid()),
            "-o",
        ]
        generate(engine, tokens, 1)
        steps.recording.counts[PREFILL] = MOST_STEPS  # decodes alone
        sampler = subprocess.Popen([*command, str(file)], stderr=subprocess.DEVNULL)
        time.sleep(1.0)
        begin, spent = time.perf_counter(), 0.0
        for number in range(1000):
            generate(engine, 16, number, answer=ANSWER_TOKENS)
            spent = time.perf_counter() - begin
            if spent > PERF_SECONDS:
                break
        sampler.send_signal(signal.SIGINT)
        sampler.wait()
        listed = subprocess.run(
            ["perf", "script", "-i", str(file), "-F", "ip,sym"], capture_output=True, text=True, check=True
        ).stdout.splitlines()
    steps.close()
    symbols = [line.split(maxsplit=1)[1] for line in listed if len(line.split()) > 1]
    taken = [each for each in timelines(steps.recording.result()) if each.step.phase == DECODE]
    ops = steps.recording.timing.ops
    own = sum(ns for each in taken for op, ns in each.ops.items() if ops[op].kernel.startswith(PRODUCTS))
    whole = sum(each.step.end - each.step.begin for each in taken)
    theirs = sum(1 for symbol in symbols if KERNELS.search(symbol)) / max(1, len(symbols))
    return {
        "check": "perf",
        "samples": len(symbols),
        "share_of_products": [own / whole, theirs],
        "symbols": [
            f"{count / len(symbols):.1%} {name[:70]}"
            for name, count in Counter(symbols).most_common(MOST_SYMBOLS)
        ],
        "difference": own / whole / theirs - 1,
        "ok": abs(own / whole / theirs - 1) <= AGREEMENT,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line("bench.profiling", __doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--tokens", type=int, default=512, help="of the prompt, and before the decode steps")
    parser.add_argument("--pairs", type=int, default=20, help="of prefills; five times as many decode steps")
    parser.add_argument("--check", choices=["overhead", "torch", "perf"], default="overhead")
    parser.add_argument("--threads", type=int, default=0, help="0: the recipe's")
    args = parser.parse_args(argv)
    artifact = Artifact.open(args.artifact)
    options = options_for(artifact, args.tokens)
    torch.set_num_threads(args.threads or options.threads or torch.get_num_threads())
    engine = load_engine(str(args.artifact), options)
    generate(engine, args.tokens, 0, answer=8)
    if args.check == "overhead":
        pairs = {PREFILL: args.pairs, DECODE: min(MOST_STEPS, 5 * args.pairs)}
        found = [overhead(engine, phase, args.tokens, count) for phase, count in pairs.items()]
    else:
        check = against_torch if args.check == "torch" else against_perf
        found = [check(engine, artifact, args.tokens)]
    print(json.dumps(found, indent=2))
    return 0 if all(row["ok"] for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
