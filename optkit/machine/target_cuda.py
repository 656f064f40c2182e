"""The GPU of this machine as a target: what it is, whether a recipe's kernels run on it, and its ceilings.

A recipe names the GPU that it is for. The GPU at hand may be another one. It must have the compute capability of the
one that is named, and as much shared memory, which the kernels' tiles are sized for. The plan is then made for the GPU
at hand: by its data sheet where it has one, else by measured ceilings.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from optkit.errors import UserError
from optkit.machine.target import DATASHEETS, Target, kept

SHEETS = {  # the devices that the data sheets are of, by the name that CUDA gives them
    "NVIDIA H100 80GB HBM3": "cuda-h100",
    "NVIDIA H200": "cuda-h200",
    "NVIDIA A100-SXM4-80GB": "cuda-a100",
}
KERNELS = ((9, 0), (8, 0))  # compute capabilities that kernels are written for, newest first
SHARED_MEMORY = {(9, 0): 232_448, (8, 0): 166_912}  # bytes that a block of these can have
FP8 = (8, 9)  # from here on tensor cores take E4M3


@dataclass(frozen=True)
class GPU:
    """What CUDA says of a device. ``shared_memory``: bytes of one block at most; None where torch does not say."""

    name: str
    capability: tuple[int, int]
    cores: int
    memory_bytes: int
    shared_memory: int | None = None

    @property
    def text(self) -> str:
        """Name and capability, for people."""
        return f"{self.name} ({label(self.capability)})"

    @property
    def isa(self) -> tuple[str, ...]:
        """Its own capability, then those that kernels are written for and that it has, too."""
        older = [label(c) for c in KERNELS if c < self.capability]
        return (
            (label(self.capability), *older) if self.capability not in KERNELS else (label(self.capability),)
        )


def label(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"


def first_gpu() -> GPU | None:
    """The first CUDA device; None without one. AMD's devices, which torch also calls ``cuda``, are none."""
    import torch

    if torch.version.hip is not None or not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    return GPU(
        found.name,
        (found.major, found.minor),
        found.multi_processor_count,
        found.total_memory,
        getattr(found, "shared_memory_per_block_optin", None),
    )


def present_gpu(wanted: Target, where: str | None, fix: str | None) -> Target:
    """The GPU of this machine, if what is made for ``wanted`` runs on it.

    Raises:
        UserError: there is no CUDA GPU, or it lacks what kernels for ``wanted`` need.
    """
    gpu = first_gpu()
    if gpu is None:
        raise UserError(
            f"it is for {wanted.name} and this machine has no CUDA GPU",
            where=where,
            fix=fix
            or "optkit optimize --dry-run shows plan and predictions here; or use a CPU recipe such as ttft-cpu",
        )
    if reason := lack(gpu, wanted):
        raise UserError(
            f"it is for {wanted.name} ({wanted.isa[0]}) and the GPU of this machine is {gpu.text}, {reason}",
            where=where,
            fix="set CUDA_VISIBLE_DEVICES to another GPU, or use a recipe for this one (optkit recipe list)",
        )
    return target_of(gpu)


def lack(gpu: GPU, wanted: Target) -> str | None:
    """What ``gpu`` lacks that kernels for ``wanted`` need, or None."""
    needed = next(c for c in KERNELS if label(c) == wanted.isa[0])
    if gpu.capability < needed:
        without = ", without float8 units" if gpu.capability < FP8 <= needed else ""
        return f"an older architecture{without}"
    if gpu.shared_memory is not None and gpu.shared_memory < SHARED_MEMORY[needed]:
        return (
            f"which has {gpu.shared_memory >> 10} KiB of shared memory for a block; "
            f"the kernels take up to {SHARED_MEMORY[needed] >> 10}"
        )
    return None


def target_of(gpu: GPU) -> Target:
    """Its data sheet, with the memory that is there; measured ceilings if it has none, or is a part of such a GPU."""
    sheet = DATASHEETS.get(SHEETS.get(gpu.name, ""))
    if sheet is not None and (gpu.cores, gpu.isa) == (sheet.cores, sheet.isa):
        return replace(sheet, memory_bytes=gpu.memory_bytes)
    return kept("cuda", asdict(gpu), lambda: measured(gpu))


def measured(gpu: GPU) -> Target:
    """``gpu`` with ceilings that are measured now."""
    import torch

    from optkit.machine import ceilings as measure

    device = torch.device("cuda", 0)
    return Target(
        name="cuda-" + "-".join(gpu.name.removeprefix("NVIDIA ").lower().split()),
        kind="cuda",
        isa=gpu.isa,
        cores=gpu.cores,
        memory_bytes=gpu.memory_bytes,
        fp32_flops=measure.product_rate(torch.float32, device),
        int8_ops=measure.product_rate(torch.int8, device),
        bf16_flops=measure.product_rate(torch.bfloat16, device),
        fp8_flops=measure.product_rate(torch.float8_e4m3fn, device) if gpu.capability >= FP8 else 0.0,
        memory_bandwidth=measure.copy_bandwidth(device),
        source="measured",
    )
