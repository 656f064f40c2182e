"""Everything that is measured on a GPU, in one go: ``python -m bench.gpu.run --out DIR``.

Stages, the most important first: ``check`` compares every kernel with float64 on fresh random inputs; ``kernels`` times
those that passed; ``models`` times whole models; ``transformers`` the same model by Transformers; ``serve`` a load.
All of it goes into ``DIR/gpu.json``, written after each measurement: a run that ends early can be resumed by starting
it again, and ``--budget`` ends it in time. What a stage needs and does not find is in the JSON as an error, and the
others run.

Kernels need torch and Triton; models also transformers, pydantic and msgspec (bench/gpu/README.md says how to take them
to a machine without a network).
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bench.gpu.bounds import table, verdicts
from bench.gpu.results import Results, Row

STAGES = ("check", "kernels", "models", "transformers", "serve")
PACKAGES = ("torch", "triton", "transformers", "numpy", "pydantic", "msgspec")


@dataclass(frozen=True)
class Settings:
    """What to measure, and on what."""

    device: torch.device
    tiny: bool
    deadline: float
    target: str

    @property
    def dtype(self) -> torch.dtype:
        """What models compute in; Triton's interpreter has no bfloat16 products."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float16


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is first imported
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA GPU; try the script with --device cpu --interpret --tiny", file=sys.stderr)
        return 2
    settings = Settings(device, args.tiny, time.monotonic() + args.budget, args.target or target_of(device))
    results = Results(args.out / "gpu.json", environment(settings))
    for stage in args.stages:
        for name, measure in MEASUREMENTS[stage](settings, results):
            if time.monotonic() > settings.deadline:
                print("the budget is used up; start again to go on", file=sys.stderr)
                break
            tell(stage, name, results.record(stage, name, measure))
    finish(results, args.out, settings)
    return int(any("error" in row for stage in args.stages for row in results.rows(stage).values()))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.run", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="directory for gpu.json and the selection table"
    )
    parser.add_argument("--stages", type=stages, default=STAGES, help=f"some of {','.join(STAGES)}")
    parser.add_argument(
        "--budget", type=float, default=3600.0, help="seconds after which nothing new is begun"
    )
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script")
    parser.add_argument("--target", help="the GPU to choose kernels for; by default the one that is there")
    parser.add_argument("--interpret", action="store_true", help="run Triton kernels by its interpreter")
    parser.add_argument("--tiny", action="store_true", help="shapes for an interpreter instead of real ones")
    return parser.parse_args(argv)


def stages(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    if unknown := set(chosen) - set(STAGES):
        raise argparse.ArgumentTypeError(f"no such stage: {', '.join(sorted(unknown))}")
    return chosen


def target_of(device: torch.device) -> str:
    """The data sheet for the GPU at hand."""
    from optkit.target import DATASHEETS

    name = torch.cuda.get_device_name(device).lower() if device.type == "cuda" else "h200"
    return next((t for t in DATASHEETS if t.removeprefix("cuda-") in name), "cuda-h100")


def environment(settings: Settings) -> Row:
    """Where the figures come from; ``same`` decides whether an earlier run's rows may stay."""
    versions = {name: installed(name) for name in PACKAGES}
    cuda = settings.device.type == "cuda"
    same = {
        "device": torch.cuda.get_device_name(settings.device) if cuda else platform.machine(),
        "versions": versions,
        "tiny": settings.tiny,
        "target": settings.target,
    }
    return {
        "same": same,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "load_average": os.getloadavg()[0],
    }


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# -- the stages: each yields names and what measures them ---------------------------------------------------

Measurements = Iterator[tuple[str, Callable[[], Row]]]


def checks(settings: Settings, results: Results) -> Measurements:
    from bench.gpu.kernels import all_cases, check, name_of

    for case in all_cases(settings.tiny):
        yield name_of(case), lambda case=case: check(case, settings.device, seed=time.time_ns() & 0xFFFF)


def kernels(settings: Settings, results: Results) -> Measurements:
    """Only those that were checked and are right."""
    from bench.gpu.kernels import all_cases, measure, name_of

    right = {name for name, row in results.rows("check").items() if row.get("ok")}
    cases = [case for case in all_cases(settings.tiny) if name_of(case) in right]
    for case in sorted(cases, key=lambda case: case.most is None):  # those with a bound first
        yield name_of(case), lambda case=case: measure(case, settings.device, seed=1)


def models(settings: Settings, results: Results) -> Measurements:
    from bench.gpu.model import LLAMA_7B, LLAMA_13B, TINY
    from bench.gpu.models import TINY_POINTS, Points, measure

    points = TINY_POINTS if settings.tiny else Points()
    shapes = [(TINY, s) for s in ("bf16", "fp8", "int4")] if settings.tiny else [
        (LLAMA_7B, "bf16"), (LLAMA_7B, "fp8"), (LLAMA_7B, "int4"), (LLAMA_13B, "fp8"), (LLAMA_13B, "bf16"),
    ]  # fmt: skip
    for shape, scheme in shapes:
        yield (
            f"{shape.name} {scheme}",
            lambda shape=shape, scheme=scheme: freed(
                lambda: measure(shape, scheme, points, *place(settings), settings.dtype)
            ),
        )


def baseline(settings: Settings, results: Results) -> Measurements:
    from bench.gpu.model import LLAMA_7B, TINY
    from bench.gpu.models import TINY_POINTS, Points, transformers_baseline

    shape, points = (TINY, TINY_POINTS) if settings.tiny else (LLAMA_7B, Points())
    yield (
        shape.name,
        lambda: freed(lambda: transformers_baseline(shape, points, settings.device, settings.dtype)),
    )


def load(settings: Settings, results: Results) -> Measurements:
    from bench.gpu.model import LLAMA_7B, TINY
    from bench.gpu.serving import Load, serve

    small = Load(clients=4, inputs=8, outputs=4, answers=6, rate_answers=3, ttft_bound=60.0, step_tokens=16)
    shape, clients = (TINY, small) if settings.tiny else (LLAMA_7B, Load())
    for scheme in ("throughput",) if settings.tiny else ("throughput", "fp8", "bf16"):
        yield (
            f"{shape.name} {scheme}",
            lambda scheme=scheme: freed(
                lambda: serve(shape, scheme, clients, *place(settings), settings.dtype)
            ),
        )


MEASUREMENTS: dict[str, Callable[[Settings, Results], Measurements]] = {
    "check": checks,
    "kernels": kernels,
    "models": models,
    "transformers": baseline,
    "serve": load,
}


def place(settings: Settings) -> tuple[Any, Any]:
    """The target, and the device of the runtime."""
    from optkit.runtime.cuda.device import CudaDevice, HostDevice
    from optkit.target import get_target

    target = get_target(settings.target)
    cuda = settings.device.type == "cuda"
    return target, CudaDevice(settings.device.index or 0) if cuda else HostDevice((1 << 31, 1 << 31))


def freed(measure: Callable[[], Row]) -> Row:
    """``measure``, and the memory that it used given back."""
    import gc

    try:
        return measure()
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def tell(stage: str, name: str, row: Row) -> None:
    figures = {k: round(v, 3) for k, v in row.items() if isinstance(v, float) and not k.startswith("q")}
    print(f"{stage}: {name}: {row.get('error') or figures}", flush=True)


def finish(results: Results, out: Path, settings: Settings) -> None:
    """The bounds against what was measured, and the table that kernels are selected by."""
    results.data["bounds"] = verdicts(results.data["stages"])
    results.save()
    write_selection(results, out, settings.target)
    print(table(results.data["bounds"]))


def write_selection(results: Results, out: Path, target: str) -> None:
    """The measured times of linear layers and prompts, as ``kernels.triton.selection`` reads them: ``sm_90.json``."""
    rows = [SimpleNamespace(**row) for row in results.rows("kernels").values() if "us" in row]
    try:
        from bench.gpu.cases import attention, linear
        from optkit.kernels.triton import selection
    except ImportError:  # without Triton there are no such kernels, and none was timed
        return
    from optkit.target import get_target

    timings = [found for row in rows for m in (linear, attention) if (found := m.timing(row, row.us))]
    if timings:
        same = results.data["environment"]["same"]
        note = f"{same['device']}, torch {same['versions']['torch']}, {results.data['environment']['time']}"
        selection.save(selection.measured(timings, get_target(target).isa[0], note), out)


if __name__ == "__main__":
    sys.exit(main())
