"""The table of hardware: every row has its source, and figures that belong together."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from optkit.machine.hardware import FILE, Row, row_of_device, rows

ASKED = {
    *("a100", "h100", "h200", "b200", "l40s", "l4", "rtx-4090", "rtx-5090", "mi300x"),
    *("graviton4", "xeon-6", "epyc-9005"),
}


def test_the_table_has_the_parts_that_plans_are_asked_for() -> None:
    assert set(rows()) >= ASKED


@pytest.mark.parametrize("name", sorted(rows()))
def test_a_row_names_its_source_and_dates(name: str) -> None:
    row = rows()[name]
    assert row.source and row.url and row.url.startswith("https://") and row.introduced and row.compared
    assert row.introduced <= row.compared
    assert not row.unverified or row.note  # a figure that nobody saw says where it comes from


@pytest.mark.parametrize("name", sorted(rows()))
def test_a_row_becomes_a_target_in_units_of_one(name: str) -> None:
    row = rows()[name]
    target = row.target(name)
    assert target.name.endswith(f"-{name}") and target.source == "datasheet"
    assert target.fp32_flops == row.rates.fp32 * 1e12 and target.memory_bandwidth == row.bandwidth * 1e9
    assert target.memory_bytes == row.memory * 1e9 and target.isa == row.isa


def test_no_device_belongs_to_two_rows() -> None:
    devices = [device for row in rows().values() for device in row.devices]
    assert len(devices) == len(set(devices))
    assert row_of_device("NVIDIA L4") == ("l4", rows()["l4"]) and row_of_device("NVIDIA L400") is None


def test_the_cpu_rates_are_cores_times_clock_times_width() -> None:
    """The figures that vendors do not publish, again by hand: 1e12 operations/s of one socket."""
    by_hand = {
        "xeon-6": (
            128 * 2.0e9 * 2 * 16 * 2,
            128 * 2.0e9 * 2048,
        ),  # two FMA units of 16 lanes; AMX of 16 x 16 x 64 in 16
        "epyc-9005": (128 * 2.7e9 * 2 * 16 * 2, 128 * 2.7e9 * 2 * 64 * 2),
        "graviton4": (96 * 2.8e9 * 4 * 4 * 2, 96 * 2.8e9 * 4 * 32 * 2),
    }
    for name, (fp32, int8) in by_hand.items():
        found = rows()[name].rates
        assert found.fp32 * 1e12 == pytest.approx(fp32, rel=0.01)
        assert found.int8 * 1e12 == pytest.approx(int8, rel=0.01)
        assert {"fp32", "int8"} <= set(rows()[name].unverified)


@pytest.mark.parametrize(
    "change", [{"kind": "tpu"}, {"cores": 0}, {"bandwidth": -1}, {"more": 1}, {"unverified": ["x"]}]
)
def test_a_wrong_row_is_refused(change: dict[str, object]) -> None:
    good = rows()["l4"].model_dump(mode="json")
    assert Row.model_validate(good) == rows()["l4"]
    with pytest.raises(ValidationError):
        Row.model_validate(good | change)


def test_the_file_lies_in_the_package() -> None:
    assert FILE.is_file() and FILE.parent.name == "machine"
