"""The table of hardware: peak rates, memory and links of parts, from the vendors' documents (``hardware.yaml``).

A row predicts a machine that is not here. Rows of users have the same form (``optkit.plan.table`` reads them with
file and line in errors). A row becomes a ``Target`` of the source ``datasheet``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator

from optkit.machine.target import Target

FILE = Path(__file__).with_name("hardware.yaml")
TERA, GIGA = 1e12, 1e9
FIGURES = ("fp32", "bf16", "fp8", "int8", "memory", "bandwidth", "link")
NAME = r"^[a-z0-9][a-z0-9._-]{0,63}$"
PREFIXES = {"cuda": "cuda-", "rocm": "rocm-", "cpu": "cpu-"}

Rate = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False, strict=False)]
Size = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False, strict=False)]
Text = Annotated[str, Field(min_length=1, max_length=400)]
Month = Annotated[str, Field(pattern=r"^\d{4}-\d{2}$")]
Words = Annotated[tuple[Text, ...], Field(max_length=32, strict=False)]


class _Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Rates(_Closed):
    """Dense peak rates in 1e12 operations/s; 0 without units for the type."""

    fp32: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False, strict=False)]
    bf16: Rate = 0.0
    fp8: Rate = 0.0
    int8: Rate = 0.0


class Row(_Closed):
    """A part: figures with their source. Units are those of ``hardware.yaml``.

    Attributes:
        devices: names by which drivers or the operating system report the part.
        isa: instruction sets of a CPU; of a GPU the compute capability, then older ones with kernels.
        unverified: figures that were derived, or not seen in a copy of the vendor's document.
    """

    title: Text
    kind: Literal["cpu", "cuda", "rocm"]
    devices: Words = ()
    isa: Words = ()
    cores: Annotated[int, Field(ge=1, le=1 << 20)]
    memory: Size
    rates: Rates
    bandwidth: Size
    link: Rate = 0.0
    source: Text
    url: Text | None = None
    introduced: Month | None = None
    compared: Month | None = None
    unverified: Words = ()
    note: Text | None = None

    @field_validator("unverified")
    @classmethod
    def names_figures(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """Refuse names of no figure."""
        for name in value:
            if name not in FIGURES:
                raise ValueError(f"'{name}' is no figure; figures are {', '.join(FIGURES)}")
        return value

    def target(self, name: str) -> Target:
        """The row as a target; a GPU of any vendor has the kind ``cuda``, whose graphs are lowered alike."""
        return Target(
            name=PREFIXES[self.kind] + name,
            kind="cpu" if self.kind == "cpu" else "cuda",
            isa=self.isa,
            cores=self.cores,
            memory_bytes=round(self.memory * GIGA),
            fp32_flops=self.rates.fp32 * TERA,
            int8_ops=self.rates.int8 * TERA,
            bf16_flops=self.rates.bf16 * TERA,
            fp8_flops=self.rates.fp8 * TERA,
            memory_bandwidth=self.bandwidth * GIGA,
            source="datasheet",
        )


@cache
def rows() -> dict[str, Row]:
    """The rows of ``hardware.yaml`` by name."""
    data: dict[str, Any] = yaml.safe_load(FILE.read_text("utf-8"))
    return {name: Row.model_validate(body) for name, body in data.items()}


def row_of_device(device: str) -> tuple[str, Row] | None:
    """Name and row of the part reported as ``device``; None for a part without a row."""
    return next(((name, row) for name, row in rows().items() if device in row.devices), None)
