"""Targets: the instruction set, cores, memory and ceilings of a machine.

The cost model needs two limits for each piece of work: arithmetic operations per second in each number type, and
bytes per second from memory (the roofline of Williams, Waterman and Patterson, 2009). The ceilings of the machine at
hand are **measured** once, in about two seconds, and cached: the cores of a virtual machine rarely match the data
sheet. The ceilings of ``DATASHEETS`` come from the vendor's **data sheet** (dense, not sparse), which no kernel
reaches. Other GPUs are measured (``target_cuda``). The field ``source`` names the origin.

Units are FLOP/s, int8 operations/s (a multiply and an add are two) and bytes/s. Zero means no units for the type.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from optkit.errors import UserError, nearest
from optkit.machine.load import disturbance
from optkit.machine.paths import cache_dir, replace_text

log = logging.getLogger(__name__)

ISA_VARIABLES = ("OPTKIT_CPU_ISA", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")

# The revision of how ceilings of a CPU are measured: kept ceilings of another one are measured anew.
MEASURED_AS = 2

ISA_FLAGS = ("sse4_2", "avx", "avx2", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "avx512_bf16")
ISA_EXTRA = ("amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve")
BF16_UNITS = {"avx512_bf16", "amx_bf16", "bf16"}

# The cores of Arm servers by implementer and part (Arm, "Main ID Register"): Linux gives no name for them.
ARM_CORES = {
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd0b"): "Cortex-A76",
    ("0x41", "0xd0c"): "Neoverse N1",
    ("0x41", "0xd40"): "Neoverse V1",
    ("0x41", "0xd49"): "Neoverse N2",
    ("0x41", "0xd4f"): "Neoverse V2",
    ("0x41", "0xd83"): "Neoverse V3AE",
    ("0x41", "0xd84"): "Neoverse V3",
    ("0x41", "0xd8e"): "Neoverse N3",
    ("0xc0", "0xac3"): "Ampere-1",
    ("0xc0", "0xac4"): "Ampere-1a",
}


@dataclass(frozen=True)
class Target:
    """A machine.

    Attributes:
        name: ``cpu`` is the machine at hand. Others begin with the kind: ``cuda-h100``, ``cuda-`` and the name of a GPU
            without a row in the table of hardware, ``cpu-graviton4``.
        kind: ``cpu`` or ``cuda``.
        isa: CPU: the instruction sets that decide between kernels. GPU: the compute capability, for example
            ``sm_90``; a GPU without own kernels also lists the older capabilities with kernels.
        cores: cores usable by the process, or streaming multiprocessors.
        memory_bytes: physical memory of the machine or the GPU.
        source: ``measured`` or ``datasheet``, the origin of the ceilings.
    """

    name: str
    kind: Literal["cpu", "cuda"]
    isa: tuple[str, ...]
    cores: int
    memory_bytes: int
    fp32_flops: float
    int8_ops: float
    bf16_flops: float
    fp8_flops: float
    memory_bandwidth: float
    source: Literal["measured", "datasheet"]

    @property
    def device(self) -> str:
        """The torch device type: ``cpu`` or ``cuda``."""
        return self.kind


class DataSheets(Mapping[str, Target]):
    """The rows of ``optkit.machine.hardware`` as targets, by the target's name; read on first use."""

    def __getitem__(self, name: str) -> Target:
        return _sheets()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_sheets())

    def __len__(self) -> int:
        return len(_sheets())


@cache
def _sheets() -> dict[str, Target]:
    from optkit.machine.hardware import rows

    found = (row.target(name) for name, row in rows().items())
    return {target.name: target for target in found}


DATASHEETS = DataSheets()


def get_target(name: str) -> Target:
    """The target called ``name``; ``cpu`` is the machine at hand, measured.

    Raises:
        UserError: the target is unknown.
    """
    if name == "cpu":
        return detect()
    if name not in DATASHEETS:
        raise UserError(f"unknown target '{name}'", fix=nearest(name, ["cpu", *DATASHEETS]))
    return DATASHEETS[name]


def detect(refresh: bool = False) -> Target:
    """The local CPU with measured ceilings, from the cache unless ``refresh``."""
    return kept("cpu", machine_facts(os.environ.get("OMP_NUM_THREADS", "")), _measured_target, refresh)


def machine_facts(threads: str) -> list[Any]:
    """The local CPU, threads, limits of instruction sets and the revision of the measurement: the key of ceilings."""
    return [cpu_model(), cpu_isa(), usable_cores(), threads, isa_limits(), MEASURED_AS]


def isa_limits() -> dict[str, str]:
    """The environment's variables that hold optkit or PyTorch to fewer instruction sets than the CPU has."""
    return {name: os.environ[name] for name in ISA_VARIABLES if name in os.environ}


# -- facts of the machine --------------------------------------------------------------------------


def cpu_model() -> str:
    """The processor's name as reported by the operating system.

    Virtual machines often report a name without numbers (``AMD EPYC``), which stands for processors of many years: the
    numbers of family and model follow.
    """
    fields = _cpuinfo()
    name, family, model = (fields.get(key) for key in ("model name", "cpu family", "model"))
    if name and family and model and not any(map(str.isdigit, name)):
        name = f"{name}, family {family} model {model}"
    names = [name, fields.get("Model"), _arm_core(fields)]
    return next(filter(None, names), platform.processor() or platform.machine())


@cache
def cpu_vendor() -> str:
    """The vendor of an x86 CPU, as in ``GenuineIntel`` or ``AuthenticAMD``; empty where the system names none."""
    return _cpuinfo().get("vendor_id", "")


def _arm_core(fields: dict[str, str]) -> str | None:
    """The name of an Arm core, or its numbers; None where ``fields`` has none."""
    implementer, part = fields.get("CPU implementer"), fields.get("CPU part")
    if implementer is None or part is None:
        return None
    return ARM_CORES.get((implementer, part), f"Arm core, implementer {implementer}, part {part}")


def cpu_isa() -> tuple[str, ...]:
    """The instruction sets of the local CPU that decide between kernels."""
    fields = _cpuinfo()
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return tuple(flag for flag in ISA_FLAGS + ISA_EXTRA if flag in flags)


def _cpuinfo() -> dict[str, str]:
    """Fields of the first processor in ``/proc/cpuinfo``; empty if the file is missing."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    lines = text.split("\n\n")[0].splitlines()
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def usable_cores() -> int:
    """Number of cores the process may run on; in a container or under taskset fewer than the machine has."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def memory_bytes() -> int:
    """Physical memory of the local machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def torch_version() -> str:
    """``torch.__version__``, read without importing torch: a start without torch needs it, and a cached target.

    The version in the metadata of some wheels lacks the part behind the plus sign.
    """
    from importlib.metadata import version
    from importlib.util import find_spec

    spec = find_spec("torch")
    for place in (spec.submodule_search_locations if spec else None) or ():
        file = Path(place) / "version.py"
        found = (
            re.search(r"^__version__ = ['\"](.+)['\"]$", file.read_text(), re.M) if file.is_file() else None
        )
        if found:
            return found[1]
    return version("torch")


# -- the cache --------------------------------------------------------------------------------------


def kept(kind: str, machine: Any, measure: Callable[[], Target], refresh: bool = False) -> Target:
    """The cached target of ``machine`` (JSON data) under the installed torch; ``measure`` fills a missing entry."""
    digest = hashlib.sha256(json.dumps([machine, torch_version()]).encode()).hexdigest()[:16]
    file = cache_dir("targets") / f"{kind}-{digest}.json"
    target = None if refresh else _read_cached(file)
    if target is None:
        target = measure()
        replace_text(file, json.dumps(asdict(target), indent=2) + "\n")
    return target


def _read_cached(file: Path) -> Target | None:
    """The cached target, or None if the file is missing or has other fields."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return Target(**{**data, "isa": tuple(data["isa"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


# -- measuring --------------------------------------------------------------------------------------


def _measured_target() -> Target:
    from optkit.machine import ceilings as measure

    if used := disturbance():
        log.warning(
            "%.0f%% of the processors are in use while the ceilings of this machine are measured: they will be "
            "too low; optkit doctor --refresh measures again",
            100 * used,
        )
    bf16_units = BF16_UNITS & set(cpu_isa())
    return Target(
        name="cpu",
        kind="cpu",
        isa=cpu_isa(),
        cores=usable_cores(),
        memory_bytes=memory_bytes(),
        fp32_flops=measure.fp32_flops(),
        int8_ops=measure.int8_ops(),
        bf16_flops=measure.bf16_flops() if bf16_units else 0.0,
        fp8_flops=0.0,
        memory_bandwidth=measure.memory_bandwidth(),
        source="measured",
    )
