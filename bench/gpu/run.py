"""All measurements on a GPU in a single run: ``python -m bench.gpu.run --out DIR``.

Stages, the most important first (``bench.gpu.stages``): ``check`` compares every kernel with float64 on fresh random
inputs and compiles the kernels of later stages; ``models`` times whole models; ``transformers`` the same model by
Transformers; ``serve`` a load; ``kernels`` times the correct kernels; ``large`` larger models. All results go into
``DIR/gpu.json``, written after each measurement. An interrupted run is resumed by the same command, and ``--budget``
ends a run in time. A stage with a missing package leaves an error in the JSON, and the next stage runs.

Kernels need torch and Triton; models also transformers, pydantic and msgspec. bench/gpu/README.md explains the
transfer to a machine without a network.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import torch

from bench.gpu.bounds import table, verdicts
from bench.gpu.interpreter import repaired
from bench.gpu.isolation import measured
from bench.gpu.results import Results, Row, attempt
from bench.gpu.stages import STAGES, Settings, Stage, open_stage, table_of

PACKAGES = ("torch", "triton", "transformers", "numpy", "pydantic", "msgspec")


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
    with repaired() if args.interpret else nullcontext():
        for stage in args.stages:
            run(stage, settings, results)
    finish(results, args.out, settings)
    return int(any("error" in row for stage in args.stages for row in results.rows(stage).values()))


def run(name: str, settings: Settings, results: Results) -> None:
    """Measure the missing rows of a stage in ``results``, until the deadline."""
    stage, right = STAGES[name], {n for n, row in results.rows("check").items() if row.get("ok")}
    try:
        known = open_stage(name, settings, right)
    except ImportError as error:  # a stage needs a package that is not here
        results.put(name, "all", {"error": f"{type(error).__name__}: {error}"})
        return
    missing = [n for n in known if not results.has(name, n)]
    if time.monotonic() > settings.deadline:
        print(f"{name}: the budget is used up; start again to go on", file=sys.stderr)
        return
    start = time.monotonic()
    if settings.device.type == "cuda":
        jobs = grouped(missing, stage)
        opening = partial(open_stage, name, settings, right)
        rows = measured(jobs, opening, stage.processes, stage.limit, settings.deadline)
    else:
        rows = here(missing, known, settings)
    for row_name, row in rows:
        results.put(name, row_name, row)
        print_row(name, row_name, row)
    left = sum(not results.has(name, n) for n in known)
    print(f"{name}: {len(known)} measurements, {left} left, {time.monotonic() - start:.0f} s", flush=True)


def here(missing: Sequence[str], known: dict, settings: Settings) -> Iterator[tuple[str, Row]]:
    """Measure in the current process, name by name."""
    for name in missing:
        if time.monotonic() > settings.deadline:
            return
        yield name, attempt(known[name])


def grouped(names: Collection[str], stage: Stage) -> list[list[str]]:
    """The names of each process, the most work first; whole models take longer than any number of kernels."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(stage.together(name), []).append(name)
    return sorted(groups.values(), key=lambda group: (" 1 layer" not in group[0], -len(group)))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.run", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="directory for gpu.json and the selection table"
    )
    parser.add_argument(
        "--stages", type=stages, default=tuple(STAGES), help=f"some of {','.join(STAGES)}, in this order"
    )
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds after which the run ends")
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
    """The target with the data sheet of the local GPU; on an interpreter the data sheet of an H200.

    Raises:
        SystemExit: the GPU has no data sheet, and the bounds would belong to another GPU.
    """
    from optkit.machine.target_cuda import KERNELS, label, sheet_of

    if device.type != "cuda":
        return "cuda-h200"
    name = torch.cuda.get_device_name(device)
    sheet = sheet_of(name)
    if sheet is None or sheet.isa[0] not in map(label, KERNELS):
        raise SystemExit(f"there is no data sheet for {name}; name the nearest target with --target")
    return sheet.name


def environment(settings: Settings) -> Row:
    """The origin of the figures; ``same`` decides whether earlier rows are kept."""
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
        **table_of(settings),
    }


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def print_row(stage: str, name: str, row: Row) -> None:
    figures = {k: round(v, 3) for k, v in row.items() if isinstance(v, float) and not k.startswith("q")}
    print(f"{stage}: {name}: {row.get('error') or figures}", flush=True)


def finish(results: Results, out: Path, settings: Settings) -> None:
    """Print the bounds beside the measured values, and write the table for selecting kernels."""
    results.data["bounds"] = verdicts(results.data["stages"])
    results.save()
    write_selection(results, out, settings.target)
    print(table(results.data["bounds"]))


def write_selection(results: Results, out: Path, target: str) -> None:
    """Write the measured times of linear layers and prompts in the format of ``kernels.triton.selection``:
    ``sm_90.json``.
    """
    rows = [SimpleNamespace(**row) for row in results.rows("kernels").values() if "us" in row]
    try:
        from bench.gpu.cases import attention, linear
        from optkit.kernels.triton import selection
    except ImportError:  # without Triton there are no such kernels, and none was timed
        return
    from optkit.machine.target import get_target

    timings = [found for row in rows for m in (linear, attention) if (found := m.timing(row, row.us))]
    if timings:
        same = results.data["environment"]["same"]
        note = f"{same['device']}, torch {same['versions']['torch']}, {results.data['environment']['time']}"
        selection.save(selection.measured(timings, get_target(target).isa[0], note), out)


if __name__ == "__main__":
    sys.exit(main())
