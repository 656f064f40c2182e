"""The stages of the GPU script: measurements by name, number of processes, and time limits."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from bench.gpu.results import Row

Measurements = Iterator[tuple[str, Callable[[], Row]]]


@dataclass(frozen=True)
class Settings:
    """The choice of measurements, and the device."""

    device: torch.device
    tiny: bool
    deadline: float
    target: str

    @property
    def dtype(self) -> torch.dtype:
        """The compute type of models; Triton's interpreter has no bfloat16 products."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float16


@dataclass(frozen=True)
class Stage:
    """``measurements`` is a function of the settings and of the names found correct.

    ``processes`` workers measure at once, each measurement for ``limit`` seconds at most. Names with the same
    ``together`` go to the same process.
    """

    measurements: Callable[[Settings, Collection[str]], Measurements]
    limit: float
    processes: int = 1
    together: Callable[[str], str] = lambda name: ""


def checks(settings: Settings, right: Collection[str]) -> Measurements:
    """Every case, and whole models with a single layer, which compile the kernels of later stages."""
    from bench.gpu.kernels import all_cases, check, name_of
    from bench.gpu.model import LLAMA_7B, TINY

    if settings.device.type == "cuda":
        from bench.gpu.models import agreement

        layer = replace(TINY if settings.tiny else LLAMA_7B, layers=1)
        for scheme in ("bf16", "fp8", "int4", "throughput"):
            yield (
                f"model · {layer.name}, 1 layer · {scheme}",
                lambda scheme=scheme: agreement(layer, scheme, *place(settings), settings.dtype),
            )
        yield f"warm-up · {layer.name}, 1 layer · serve", lambda: warm_up(settings, layer)
    for case in all_cases(settings.tiny):
        yield (
            name_of(case),
            lambda case=case: freed(lambda: check(case, settings.device, time.time_ns() & 0xFFFF)),
        )


def warm_up(settings: Settings, layer: Any) -> Row:
    """Compile all kernels of the load by serving a short load."""
    from bench.gpu.serving import Load, serve

    short = replace(Load(), answers=8, rate_answers=2, kv_bytes=1 << 30)
    row = serve(layer, "throughput", short, *place(settings), settings.dtype)
    return {"ok": row["captures_after_warm_up"] == 0, "eager_steps": row["eager_steps"]}


def kernels(settings: Settings, right: Collection[str]) -> Measurements:
    """Only cases with a successful check; cases with a bound first."""
    from bench.gpu.kernels import all_cases, measure, name_of

    cases = [case for case in all_cases(settings.tiny) if name_of(case) in right]
    for case in sorted(cases, key=lambda case: case.most is None):
        yield name_of(case), lambda case=case: freed(lambda: measure(case, settings.device, seed=1))


def models(settings: Settings, right: Collection[str], large: bool = False) -> Measurements:
    from bench.gpu.model import LLAMA_7B, LLAMA_13B, TINY
    from bench.gpu.models import TINY_POINTS, Points, measure

    points = TINY_POINTS if settings.tiny else Points()
    shape, schemes = (LLAMA_13B, ("fp8", "bf16")) if large else (LLAMA_7B, ("bf16", "fp8", "int4"))
    if settings.tiny:
        shape, schemes = TINY, ("fp8",) if large else schemes
    for scheme in schemes:
        yield (
            f"{shape.name} {scheme}",
            lambda scheme=scheme: freed(
                lambda: measure(shape, scheme, points, *place(settings), settings.dtype) | table_of(settings)
            ),
        )


def baseline(settings: Settings, right: Collection[str]) -> Measurements:
    from bench.gpu.model import LLAMA_7B, TINY
    from bench.gpu.models import TINY_POINTS, Points, transformers_baseline

    shape, points = (TINY, TINY_POINTS) if settings.tiny else (LLAMA_7B, Points())
    yield (
        shape.name,
        lambda: freed(lambda: transformers_baseline(shape, points, settings.device, settings.dtype)),
    )


def load(settings: Settings, right: Collection[str]) -> Measurements:
    from bench.gpu.model import LLAMA_7B, TINY
    from bench.gpu.serving import Load, serve

    small = Load(clients=4, inputs=8, outputs=4, answers=6, rate_answers=3, ttft_bound=60.0, step_tokens=16)
    shape, clients = (TINY, small) if settings.tiny else (LLAMA_7B, Load())
    for scheme in ("throughput",) if settings.tiny else ("throughput", "fp8", "bf16"):
        yield (
            f"{shape.name} {scheme}",
            lambda scheme=scheme: freed(
                lambda: serve(shape, scheme, clients, *place(settings), settings.dtype) | table_of(settings)
            ),
        )


def kernel_of(name: str) -> str:
    """The key of cases with the same compiled kernels: op, kernel, type and heads."""
    op, kernel, shape, stored = name.split(" · ") if name.count(" · ") == 3 else (name, "", "", "")
    return f"{op} {kernel} {stored} {re.findall(r'[0-9]+/[0-9]+ heads', shape)}"


# In the order in which they are run: the most important first.
STAGES = {
    "check": Stage(checks, 240.0, max(1, min(14, (os.cpu_count() or 1) - 2)), kernel_of),
    "models": Stage(models, 240.0),
    "transformers": Stage(baseline, 400.0),
    "serve": Stage(load, 300.0),
    "kernels": Stage(kernels, 60.0),
    "large": Stage(partial(models, large=True), 300.0),
}


def open_stage(stage: str, settings: Settings, right: Collection[str]) -> dict[str, Callable[[], Row]]:
    """The measurements of a stage, by name."""
    return dict(STAGES[stage].measurements(settings, right))


def place(settings: Settings) -> tuple[Any, Any]:
    """The target, and the device of the runtime."""
    from optkit.machine.target import get_target
    from optkit.runtime.cuda.device import CudaDevice, HostDevice

    target = get_target(settings.target)
    cuda = settings.device.type == "cuda"
    return target, CudaDevice(settings.device.index or 0) if cuda else HostDevice((1 << 31, 1 << 31))


def table_of(settings: Settings) -> Row:
    """Origin of the table for choosing the kernel of a linear layer; {} without Triton."""
    try:
        from optkit.kernels.triton import selection
    except ImportError:
        return {}
    from optkit.machine.target import get_target

    return {"table": selection.table(get_target(settings.target).isa[0]).get("note")}


def freed(measure: Callable[[], Row]) -> Row:
    """The row of ``measure``; afterwards the device memory is released."""
    import gc

    try:
        return measure()
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
