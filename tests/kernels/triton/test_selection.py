"""The table of measured times: what it says, what it falls back to, and that the shipped ones are well-formed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from optkit.kernels.triton import available, selection
from optkit.kernels.triton.selection import Timing


@pytest.fixture(autouse=True)
def fresh() -> Any:
    yield
    selection.table.cache_clear()
    selection.winner.cache_clear()


def timings() -> list[Timing]:
    at_4096 = {1: (5, 9), 8: (6, 8), 32: (9, 8), 512: (40, 12)}
    large = {1: (50, 40), 512: (400, 120)}
    return [
        Timing("linear", "16-bit", kernel, m, n, 4096, us)
        for n, times in ((4096, at_4096), (22016, large))
        for m, both in times.items()
        for kernel, us in zip(("gemv", "cublas"), both, strict=True)
    ]


def test_the_fastest_wins_between_measured_numbers_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = selection.measured(timings(), "sm_90", "here")
    assert [layer["best"] for layer in table["layers"]] == [
        [[16, "gemv"], [None, "cublas"]],
        [[None, "cublas"]],
    ]
    assert table["source"] == "measured"
    monkeypatch.setattr(selection, "FOLDER", tmp_path)
    selection.save(table, tmp_path)
    able = {"cublas": True, "gemv": True}
    assert selection.choose("linear", "16-bit", (16, 4096, 4096), "sm_90", able) == "gemv"
    assert selection.choose("linear", "16-bit", (17, 4096, 4096), "sm_90", able) == "cublas"
    assert (
        selection.choose("linear", "16-bit", (1, 12288, 4096), "sm_90", able) == "cublas"
    )  # nearer to 22016
    assert selection.choose("linear", "16-bit", (1, 4096, 4096), "sm_90", able | {"gemv": False}) == "cublas"
    assert (
        selection.choose("linear", "float32", (1, 4096, 4096), "sm_90", able) == "cublas"
    )  # not in the table
    assert selection.choose("linear", "16-bit", (1, 4096, 4096), "sm_80", able) == "cublas"  # no table


@pytest.mark.skipif(not available(), reason="Triton is not installed")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_shipped_tables(arch: str) -> None:
    table = selection.table(arch)
    assert table["schema_version"] == selection.SCHEMA_VERSION and table["architecture"] == arch
    assert table["source"] in ("measured", "published") and table["note"]
    for layer in table["layers"]:
        assert layer["us"] or table["source"] == "published"
        bounds = [most for most, _ in layer["best"]]
        assert bounds[-1] is None and bounds[:-1] == sorted(bounds[:-1])
        assert {name for _, name in layer["best"]} <= {
            "gemv", "tile", "cublas", "scaled_mm", "int_mm", "dequantized", "sdpa", "triton",
        }  # fmt: skip
