"""Predictions of ``optkit plan`` against measurements through the runtime.

    python -m bench.plan smollm2-135m --artifact ttft-cpu=artifact/ --artifact edge-cpu=artifact-edge/
    python -m bench.plan smollm2-135m --recipe baseline --rounds 1
    python -m bench.plan smollm2-135m --recipe ttft-cpu --sweep chunk
    python -m bench.plan smollm2-135m --recipe ttft-cpu --sweep wait

Each recipe is planned twice, from ceilings and shares alone and after the calibration of 30 seconds, and measured on
an artifact in the same process: prompts of 128 to 2048 tokens, decoding, and 8 clients at once. Missing artifacts are
made first, which takes minutes for recipes with quantization. A calibration is interrupted for measurements every few
seconds, so that both meet the same minutes of a machine with neighbours; means of each calibration's measurements,
medians over calibrations.
Exit code 1: a prediction is further off than the bound, 30 % without and 10 % with calibration. ``--sweep`` prints the
sweeps of docs/planning.md instead. Run on an idle machine: the load average is in the result.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.figures import command_line
from bench.plan import measure, sweep
from optkit.artifact.open import Artifact
from optkit.bench.environment import busy, environment
from optkit.bench.run import baseline_artifact
from optkit.capture import capture_directory
from optkit.checkpoint.locate import resolve
from optkit.graph.ir import Graph
from optkit.machine.target import Target, get_target
from optkit.passes.base import PassContext
from optkit.passes.resolve import resolve_passes
from optkit.pipeline.driver import optimize
from optkit.plan.calibrate import Calibrated, calibrate
from optkit.plan.gains import costs_of
from optkit.plan.planner import chain_of
from optkit.plan.steps import StepModel
from optkit.plan.virtual import clients
from optkit.recipe.load import load_recipe
from optkit.recipe.schema import Recipe
from optkit.runtime.engine import Engine
from optkit.runtime.factory import open_engine

RECIPES = ("baseline", "ttft-cpu", "edge-cpu")
PROMPTS = (128, 512, 1024, 2048)
DECODE = (512, 48)  # tokens in and out
WAVE = (8, 256, 64)  # clients, tokens in and out
SECONDS, REPEATS = 1.0, 5  # of a prompt's measurement
APART = 2.5  # seconds of a calibration between two measurements of all figures
BOUNDS = {"shares": 0.3, "calibrated": 0.1}
SWEEPS = {"chunk": sweep.chunks, "wait": sweep.waits}


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line("bench.plan", __doc__)
    parser.add_argument("model")
    parser.add_argument("--recipe", action="append", choices=RECIPES, help="may be repeated; default: all")
    parser.add_argument("--artifact", action="append", default=[], metavar="RECIPE=DIR")
    parser.add_argument("--rounds", type=int, default=2, help="calibrations, or rounds of a sweep")
    parser.add_argument("--sweep", choices=SWEEPS)
    parser.add_argument("--save-result", type=Path)
    args = parser.parse_args(argv)
    given = {recipe: directory for recipe, _, directory in (text.partition("=") for text in args.artifact)}
    if wrong := [recipe for recipe in given if recipe not in RECIPES or not given[recipe]]:
        parser.error(f"--artifact {wrong[0]}: give RECIPE=DIR, with one of {', '.join(RECIPES)}")
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: give 1 or more")
    names = args.recipe or ([*given] if given else [*RECIPES])
    about = environment()
    if warning := busy(about):
        print(f"warning: {warning}")
    result: dict[str, Any] = {"kind": "plan", "environment": about, "model": args.model, "recipes": {}}
    missed = []
    for name in names:
        artifact = Path(given[name]) if name in given else made(args.model, name)
        recipe = Artifact.open(artifact, verify=False).recipe
        graph = planned(args.model, recipe)
        engine = open_engine(str(artifact), enable_prefix_caching=False)
        if args.sweep:
            target = get_target("cpu")
            steps = calibrate(graph, StepModel(graph, target), recipe, target, measure=True)
            result["recipes"][name] = SWEEPS[args.sweep](str(artifact), steps, args.rounds)
            continue
        found = compared(graph, recipe, engine, args.rounds)
        result["recipes"][name] = found
        missed += [f"{name}: {row}" for row in print_rows(name, found)]
    if args.save_result:
        args.save_result.write_text(json.dumps(result | {"missed": missed}, indent=1) + "\n")
    print("\n".join(f"MISSED {row}" for row in missed) or "done")
    return 1 if missed else 0


def made(model: str, recipe: str) -> Path:
    """The artifact of a recipe, made now where missing."""
    if recipe == "baseline":
        return baseline_artifact(model)
    path = Path(f"{recipe}-artifact")
    if not path.is_dir():
        print(f"making {path}")
        optimize(model, recipe, path)
    return path


def planned(model: str, recipe: Recipe) -> Graph:
    """The graph after the passes of ``recipe``, without weights, as in ``optkit plan``."""
    target = get_target(recipe.target)
    graph = capture_directory(
        resolve(model, weights=False).directory, weights=False, max_model_len=recipe.runtime.max_model_len
    )
    chain = chain_of(
        graph,
        resolve_passes(load_recipe(recipe.name)),
        PassContext(target),
        lambda candidate: costs_of(candidate, recipe, lambda one: StepModel(one, target)).objective,
    )
    return chain.result


class Alternating:
    """Measurements of ``engine`` between the rounds of a calibration, for which the clock stands still."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.paused, self.last = engine, 0.0, -APART
        self.samples: list[dict[str, float]] = []

    def clock(self) -> float:
        """Seconds of the calibration alone."""
        return time.monotonic() - self.paused

    def between(self) -> None:
        """Measure, where the calibration has gone on for ``APART`` seconds."""
        if self.clock() - self.last >= APART:
            self.measure()

    def measure(self) -> None:
        start = time.monotonic()
        self.samples.append(measured(self.engine))
        self.paused += time.monotonic() - start
        self.last = self.clock()

    def means(self) -> dict[str, float]:
        """The mean of each figure."""
        return {name: statistics.fmean(found[name] for found in self.samples) for name in self.samples[0]}


def compared(graph: Graph, recipe: Recipe, engine: Engine, calibrations: int) -> dict[str, Any]:
    """Predictions of both kinds, measurements, and errors by figure, as medians over calibrations."""
    target = get_target("cpu")
    model = StepModel(graph, target)
    measured(engine)  # warm up
    found: list[dict[str, Any]] = []
    for _ in range(calibrations):
        beside = Alternating(engine)
        start = beside.clock()
        steps = calibrate(
            graph, model, recipe, target, measure=True, clock=beside.clock, between=beside.between
        )
        seconds = beside.clock() - start
        if not beside.samples:  # of a calibration without rounds, by layers
            beside.measure()
        predicted = {
            "shares": figures(Calibrated(model), recipe, engine),
            "calibrated": figures(steps, recipe, engine),
        }
        found.append(predicted | {"measured": beside.means(), "samples": beside.samples})
    return {
        "calibration_seconds": seconds,
        "anchors": [anchor.to_dict() for anchor in steps.anchors],
        "ceilings": ceilings(target),
        "rounds": found,
    } | medians(found)


def medians(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """The medians of measurements, predictions and errors (predicted / measured - 1) over rounds, by figure."""
    names = list(rounds[0]["measured"])

    def median(kind: str, value: Callable[[float, float], float]) -> dict[str, float]:
        return {
            name: statistics.median(value(one[kind][name], one["measured"][name]) for one in rounds)
            for name in names
        }

    return {
        "measured": median("measured", lambda own, _: own),
        "predicted": {kind: median(kind, lambda own, _: own) for kind in BOUNDS},
        "errors": {kind: median(kind, lambda own, real: own / real - 1) for kind in BOUNDS},
    }


def ceilings(target: Target) -> dict[str, float]:
    names = ("fp32_flops", "int8_ops", "bf16_flops", "memory_bandwidth", "cores")
    return {name: getattr(target, name) for name in names}


def figures(steps: Calibrated, recipe: Recipe, engine: Engine) -> dict[str, float]:
    """The predicted figures, by the names of ``measured``."""
    budget = recipe.runtime.max_num_batched_tokens
    prompt, output = DECODE
    found = {f"prefill {tokens}": steps.prefill(tokens, budget).seconds for tokens in PROMPTS}
    found[f"decode at {prompt}"] = steps.decode(1, prompt + output // 2).seconds
    wave = clients(engine.config, lambda step: steps.step(step).seconds, *WAVE)
    return found | of_wave(wave)


def measured(engine: Engine) -> dict[str, float]:
    """The figures, after a request that is not measured: a calibration leaves caches to another model."""
    measure.prefill_seconds(engine, PROMPTS[0])
    found = {f"prefill {tokens}": prefill(engine, tokens) for tokens in PROMPTS}
    found[f"decode at {DECODE[0]}"] = measure.decode_seconds(engine, *DECODE)
    return found | of_wave(measure.wave(engine, *WAVE))


def prefill(engine: Engine, tokens: int) -> float:
    """The mean time to first token of a prompt of ``tokens`` tokens, in ``SECONDS``, of up to ``REPEATS`` requests."""
    found = [measure.prefill_seconds(engine, tokens)]
    while sum(found) < SECONDS and len(found) < REPEATS:
        found.append(measure.prefill_seconds(engine, tokens))
    return statistics.fmean(found)


def of_wave(wave: dict[str, Any]) -> dict[str, float]:
    return {
        f"{WAVE[0]} clients, mean TTFT": wave["ttft_mean_seconds"],
        f"{WAVE[0]} clients, TPOT": wave["tpot_mean_seconds"],
        f"{WAVE[0]} clients, s a token": 1 / wave["output_tokens_per_second"],
    }


def print_rows(recipe: str, found: dict[str, Any]) -> list[str]:
    """Print a line a figure with both errors; the figures beyond a bound."""
    missed = []
    print(f"{recipe}: calibrated in {found['calibration_seconds']:.1f} s, {len(found['anchors'])} steps")
    print(f"  {'':26} {'measured':>10} {'shares':>18} {'calibrated':>18}")
    for name, seconds in found["measured"].items():
        cells = []
        for kind, bound in BOUNDS.items():
            predicted, error = found["predicted"][kind][name], found["errors"][kind][name]
            cells.append(f"{predicted * 1e3:8.2f} ({error:+7.1%})")
            if not abs(error) <= bound:
                missed.append(f"{name}, {kind}: {error:+.1%}")
        print(f"  {name:26} {seconds * 1e3:7.2f} ms {' '.join(f'{cell:>18}' for cell in cells)}")
    return missed


if __name__ == "__main__":
    sys.exit(main())
