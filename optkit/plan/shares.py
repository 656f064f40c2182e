"""The shares of the peaks that kernels reach: the difference between a roofline and a prediction.

No kernel reaches a ceiling. The shares of CPUs are from measured steps against the measured ceilings of the same
machine (docs/planning.md). CPUs with an instruction for products of bytes have a set of shares, and CPUs with AVX2 and
no such instruction another set; both stand in for other CPUs of the same kind. GPUs have no shares: predictions are the
roofline, a floor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from optkit.machine.float_products import runs_by_onednn
from optkit.machine.target import Target


class Unit(Enum):
    """The arithmetic of an op, by name in tables."""

    FLOAT = "float32"
    HALF = "bfloat16"
    INT8 = "int8"
    INT4 = "int4"
    WEIGHT_ONLY = "weight-only"
    FP8 = "fp8"
    ATTENTION = "attention"
    ATTENTION_INT8 = "int8 attention"
    PLAIN_ATTENTION = "PyTorch's attention"
    OTHER = "other"


@dataclass(frozen=True)
class Shares:
    """Shares of the peak rates, in (0, 1], and the fixed times of a step.

    Attributes:
        compute: by unit; units without an entry reach ``other``.
        bandwidth: of memory, by unit; units without an entry reach ``reading``.
        in_turns: units that read weights and multiply in turns; all other units read and multiply at once.
        packing: by unit, the bytes moved to copy the weights into another order, as a multiple of the weights. Only
            products of several rows copy weights.
        calls: seconds of each call, by unit; units without an entry take ``call_seconds``, None is the cost model's.
        row_seconds: of a step, for each sequence: sampling, tables, bookkeeping.
        step_seconds: of a step, for the scheduler and the runner.
        source: the origin, for people.
    """

    compute: dict[Unit, float]
    other: float
    bandwidth: dict[Unit, float]
    reading: float
    in_turns: frozenset[Unit]
    packing: dict[Unit, float]
    calls: dict[Unit, float]
    call_seconds: float | None
    row_seconds: float
    step_seconds: float
    source: str


FLOOR = Shares({}, 1.0, {}, 1.0, frozenset(), {}, {}, None, 0.0, 0.0, "roofline: a floor, kernels reach less")
CPU = Shares(
    {
        Unit.FLOAT: 0.98,  # the ceiling is measured with the same product
        Unit.INT8: 0.8,
        Unit.INT4: 0.68,
        Unit.WEIGHT_ONLY: 0.6,
        Unit.ATTENTION: 0.9,
        Unit.ATTENTION_INT8: 0.6,
        Unit.PLAIN_ATTENTION: 0.6,
    },
    other=0.1,
    # PyTorch's own product of one row reads weights slowly; plain attention gathers blocks of KV first, and attention
    # over int8 reads a block of each head, far from the next
    bandwidth={
        Unit.FLOAT: 0.31,
        Unit.ATTENTION: 0.3,
        Unit.ATTENTION_INT8: 0.25,
        Unit.PLAIN_ATTENTION: 0.17,
    },
    reading=0.95,
    in_turns=frozenset({Unit.FLOAT, Unit.INT8, Unit.INT4, Unit.WEIGHT_ONLY}),
    packing={Unit.FLOAT: 0.5},
    calls={Unit.FLOAT: 1e-5, Unit.PLAIN_ATTENTION: 1.5e-4},
    call_seconds=5e-7,  # ops of a native program
    row_seconds=5e-5,
    step_seconds=1e-4,
    source="shares of the ceilings that optkit's kernels reach",
)
# Each byte of a weight takes several instructions, so few rows do not wait for memory alone.
CPU_AVX2 = replace(
    CPU,
    compute=CPU.compute | {Unit.INT8: 0.75, Unit.INT4: 0.72, Unit.WEIGHT_ONLY: 0.5},
    bandwidth=CPU.bandwidth | {Unit.FLOAT: 0.28, Unit.ATTENTION_INT8: 0.23, Unit.PLAIN_ATTENTION: 0.1},
    reading=0.65,
    packing={Unit.FLOAT: 0.8},
    step_seconds=2e-4,
)
MKL_OVER_ONEDNN = 0.71  # rates of a large float32 product, on an AMD EPYC (docs/lab-notes.md)
FLOAT_UNITS = (Unit.WEIGHT_ONLY, Unit.ATTENTION, Unit.PLAIN_ATTENTION)  # beside float layers
DOT_PRODUCTS = {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"}  # of bytes, in one instruction


def shares_of(target: Target) -> Shares:
    """The shares of kernels on ``target``."""
    if target.kind == "cuda":
        return FLOOR
    shares = CPU if DOT_PRODUCTS & set(target.isa) else CPU_AVX2
    return with_onednn(shares) if runs_by_onednn(target) else shares


def with_onednn(shares: Shares) -> Shares:
    """``shares`` on a CPU whose float layers, and float32 ceiling, are products of oneDNN.

    Shares of other units that multiply floats were measured against MKL's lower ceiling.
    """
    others = {unit: MKL_OVER_ONEDNN * shares.compute[unit] for unit in FLOAT_UNITS}
    return replace(
        shares,
        compute=shares.compute | others,
        other=MKL_OVER_ONEDNN * shares.other,
        bandwidth=shares.bandwidth | {Unit.FLOAT: 0.38},
        packing={},
    )
