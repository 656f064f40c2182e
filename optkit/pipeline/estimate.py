"""An estimate of time, memory and disk of a run, before anything starts; what cannot fit is refused.

The sizes come from the headers of the checkpoint and from the recipe, the rates from the machine's measured ceilings.
docs/sizes.md has the formulas. The estimate is for planning: it counts what grows with the model, not every buffer.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from optkit.calibration.samples import Calibration
from optkit.capture.limits import MAX_LOADED_BYTES
from optkit.checkpoint.validate import CheckpointInfo
from optkit.errors import UserError
from optkit.evaluation.limits import KEPT_ON_DISK, WINDOW_TOKENS, most_tokens, weight_limit
from optkit.machine.paths import cache_dir
from optkit.machine.target import Target
from optkit.passes.base import Stage
from optkit.passes.resolve import Resolved, ResolvedPass

PROCESS_BYTES = 1.3e9  # Python, torch, transformers, and what their allocators keep
WINDOWS_IN_MEMORY = 6  # of logits: two windows of each side, and of the rows before they are placed
REACHED = 0.4  # of the peak rate, by whole models in float32
CHECK_TOKENS = 400  # of the capture's check, both sides together
PASS_TOKENS = 4096  # of text on which the quality of a pass is measured; not counted: more text near a bound
DISK_BYTES_PER_SECOND = 1e9
GB = 1e9


@dataclass(frozen=True)
class Estimate:
    """Seconds, and bytes at the peak.

    Attributes:
        parameters: numbers in the checkpoint, tied tensors once.
        memory: of the run.
        served: of the weights of the result in a server.
        disk: of the cache of finished steps and of the artifact together.
    """

    parameters: int
    seconds: float
    memory: float
    served: float
    disk: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    def line(self) -> str:
        """The estimate in a line."""
        return (
            f"estimate for {self.parameters / GB:.2f}B parameters: about {minutes(self.seconds)}, "
            f"{self.memory / GB:.1f} GB of memory, {self.disk / GB:.1f} GB of disk; "
            f"{self.served / GB:.1f} GB of weights when served"
        )


def minutes(seconds: float) -> str:
    return f"{max(1, round(seconds / 60))} min" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def estimate(
    info: CheckpointInfo,
    resolved: Sequence[Resolved],
    target: Target,
    final_tokens: int,
    *,
    float_copies: bool = False,
    loaded_whole: bool = False,
) -> Estimate:
    """The estimate of a run of the passes ``resolved`` on the checkpoint ``info``.

    Args:
        float_copies: the artifact may have float32 copies of the layers (``files`` of a recipe).
        loaded_whole: the capture loads all weights, however large (``optkit.capture.streamed``).
    """
    sizes = [math.prod(tensor.shape) for tensor in info.tensors.values()]
    parameters, largest = sum(sizes), max(sizes, default=0)
    passes = list(all_passes(resolved))
    vocabulary = int(info.config.get("vocab_size") or 0)
    tokens = min(final_tokens, most_tokens(parameters))
    served = result_bytes(parameters, largest, passes)
    memory = run_memory(parameters, largest, vocabulary, served, target, loaded_whole=loaded_whole)
    changed = sum(4 * parameters for one in passes if one.pass_class.stage == Stage.TRANSFORM)
    logits = min(KEPT_ON_DISK, 4 * tokens * vocabulary) if 4 * parameters > weight_limit(target) else 0
    copies = 4 * parameters if float_copies else 0
    disk = 2 * changed + 3 * served + copies + logits  # results wait on disk until the step is written
    text = CHECK_TOKENS + sum(map(pass_tokens, passes)) + tokens * 2
    text += sum(min(PASS_TOKENS, tokens) for one in passes if not one.pass_class.exact)
    seconds = 2 * parameters * text / (REACHED * target.fp32_flops) if target.fp32_flops else 0.0
    seconds += 4 * parameters * (3 + len(passes)) / DISK_BYTES_PER_SECOND
    seconds += sum(60 * getattr(one.config, "minutes", 0.0) for one in passes)  # a budget of training
    return Estimate(parameters, seconds, memory, served, disk)


def run_memory(
    parameters: int,
    largest: int,
    vocabulary: int,
    served: float,
    target: Target,
    *,
    loaded_whole: bool = False,
) -> float:
    """Bytes of memory of a run at the peak: the capture, or a measurement."""
    floats = 4 * parameters
    whole = loaded_whole or floats <= MAX_LOADED_BYTES
    capture = 1.2 * floats if whole else 1.3 * 4 * largest
    limit = weight_limit(target)
    speed = min(2 * floats, limit) + served
    quality = (
        (2 * floats if floats <= limit else 0) + served + 4 * vocabulary * WINDOW_TOKENS * WINDOWS_IN_MEMORY
    )
    return PROCESS_BYTES + max(capture, speed, quality)


def all_passes(resolved: Sequence[Resolved]) -> Iterator[ResolvedPass]:
    """Every pass that may run, candidates included."""
    for item in resolved:
        yield from [item] if isinstance(item, ResolvedPass) else (p for c in item.candidates for p in c)


def result_bytes(parameters: int, largest: int, passes: Sequence[ResolvedPass]) -> float:
    """Bytes of the weights after the passes: the quantizer with the most bits counts.

    The largest tensor, of the vocabulary, stays in float32 unless the output head is quantized too.
    """
    quantizers = [one for one in passes if one.pass_class.stage == Stage.QUANTIZE]
    if not quantizers:
        return 4.0 * parameters
    width = max(bytes_per_weight(one) for one in quantizers)
    head = any(getattr(one.config, "lm_head", False) for one in quantizers)
    return width * (parameters - (0 if head else largest)) + (0 if head else 4 * largest)


def bytes_per_weight(one: ResolvedPass) -> float:
    """Bytes of a weight with its share of scales, by the options of the pass; of overrides those with the most bits."""
    options: dict[str, Any] = one.config.model_dump()
    others = options.pop("overrides", {}).values()
    return max(bytes_by_options(one, options | other) for other in ({}, *others))


def bytes_by_options(one: ResolvedPass, options: Mapping[str, Any]) -> float:
    """``bytes_per_weight`` of layers with ``options``, in the layout of the native kernels.

    A group of int8 has a scale in float16, as most weights have, and the sum of its codes; a group of 4 bits a scale
    and a minimum in float32.
    """
    group = int(options.get("group_size") or 128)
    scheme = str(options.get("scheme") or one.entry.pass_name).lower()
    bits = 4 if "w4" in scheme else 8
    return bits / 8 + (8 if bits == 4 else 6) / group


def pass_tokens(one: ResolvedPass) -> int:
    """Tokens of text that a pass runs through the model: every field of type ``Calibration``."""
    config: BaseModel = one.config
    values = [getattr(config, name) for name in type(config).model_fields]
    return sum(value.samples * value.length for value in values if isinstance(value, Calibration))


def refuse_what_cannot_fit(
    found: Estimate, target: Target, out: Path, resolved: Sequence[Resolved] = ()
) -> None:
    """Raise an error for a run of the passes ``resolved`` beyond the memory of the machine, or the free disk.

    Raises:
        UserError: with the number that is too large, and the option that helps.
    """
    have = target.memory_bytes
    narrow = [one for one in all_passes(resolved) if is_narrow(one)]
    larger = "use a smaller model, or a machine with more memory"
    if target.kind == "cpu" and found.served > 0.9 * have:
        raise UserError(
            f"the result would take {found.served / GB:.1f} GB of weights, this machine has {have / GB:.1f} GB "
            "of memory",
            fix=larger
            if any(getattr(one.config, "lm_head", False) for one in narrow)
            else "quantize to fewer bits: a recipe with w4a8 and lm_head: true takes about "
            f"{found.parameters * 0.75 / GB:.1f} GB",
        )
    if target.kind == "cpu" and found.memory > have:
        raise UserError(
            f"the run would take about {found.memory / GB:.1f} GB of memory, this machine has {have / GB:.1f} GB",
            fix=larger
            if narrow
            else "use a recipe with w4a8 in place of 8 bits or float, or a machine with more memory",
        )
    remedies = {
        existing(out): "write the artifact to a directory on a larger disk",
        cache_dir(
            "states"
        ): "set OPTKIT_CACHE to a directory on a larger disk, or leave smoothquant and rotate out of "
        "the recipe",
    }
    disks = {place.stat().st_dev: place for place in remedies}  # of one disk, the cache is named
    free, place = min((shutil.disk_usage(place).free, place) for place in disks.values())
    if found.disk > free:
        raise UserError(
            f"the run would take about {found.disk / GB:.1f} GB of disk, {free / GB:.1f} GB are free",
            where=str(place),
            fix=remedies[place],
        )


def is_narrow(one: ResolvedPass) -> bool:
    """True for a quantizer to 4 bits."""
    return one.pass_class.stage == Stage.QUANTIZE and bytes_per_weight(one) < 1


def existing(path: Path) -> Path:
    """``path``, or the nearest directory above that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
