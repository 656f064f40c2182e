"""The local GPU as a target: capability, shared memory, and ceilings.

A recipe names a GPU, and the local GPU may be a different model. The local GPU needs at least the compute capability
of the named GPU, and the shared memory for the tiles of the kernels. Plans are then made for the local GPU, by the
data sheet of the model or else by measured ceilings.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from optkit.errors import UserError
from optkit.machine.hardware import row_of_device
from optkit.machine.target import Target, kept

KERNELS = ((9, 0), (8, 0))  # compute capabilities with kernels, newest first
SHARED_MEMORY = {(9, 0): 232_448, (8, 0): 166_912}  # bytes, the most of one block
FP8 = (8, 9)  # the first compute capability whose tensor cores take E4M3


@dataclass(frozen=True)
class GPU:
    """The properties of a CUDA device.

    ``shared_memory`` is the limit of a block in bytes, None if torch does not report the value.
    """

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
        """The capability of the GPU. A GPU without own kernels also lists the older capabilities with kernels."""
        older = [label(c) for c in KERNELS if c < self.capability]
        return (
            (label(self.capability), *older) if self.capability not in KERNELS else (label(self.capability),)
        )


def label(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"


def first_gpu() -> GPU | None:
    """The first CUDA device; None without a GPU. AMD GPUs, which torch also calls ``cuda``, do not count."""
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
    """The local GPU as a target, if kernels for ``wanted`` run there.

    Raises:
        UserError: there is no CUDA GPU, or the GPU lacks a feature needed by kernels for ``wanted``.
    """
    gpu = first_gpu()
    if gpu is None:
        raise UserError(
            f"made for {wanted.name} and this machine has no CUDA GPU",
            where=where,
            fix=fix
            or "optkit optimize --dry-run shows plan and predictions here; or use a CPU recipe such as ttft-cpu",
        )
    if reason := lack(gpu, wanted):
        raise UserError(
            f"made for {wanted.name} ({wanted.isa[0]}) and the GPU of this machine is {gpu.text}, {reason}",
            where=where,
            fix="set CUDA_VISIBLE_DEVICES to another GPU, or use a recipe for this one (optkit recipe list)",
        )
    return target_of(gpu)


def lack(gpu: GPU, wanted: Target) -> str | None:
    """The feature of ``gpu`` missing for kernels for ``wanted``, as text; None if nothing is missing."""
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
    """The target of ``gpu``: the data sheet with the actual memory size, else measured ceilings.

    A part of a GPU (MIG) has other cores than the data sheet and is measured.
    """
    sheet = sheet_of(gpu.name)
    if sheet is not None and (gpu.cores, gpu.isa) == (sheet.cores, sheet.isa):
        return replace(sheet, memory_bytes=gpu.memory_bytes)
    return kept("cuda", asdict(gpu), lambda: measured(gpu))


def sheet_of(device: str) -> Target | None:
    """The target with the data sheet of the GPU reported as ``device``; None for a GPU without a row."""
    found = row_of_device(device)
    return found[1].target(found[0]) if found else None


def measured(gpu: GPU) -> Target:
    """The target of ``gpu`` with ceilings measured now."""
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
