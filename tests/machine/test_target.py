"""Targets: data sheet rows, detection, and a cache that can be wrong without harm."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from optkit.artifact.open import Artifact
from optkit.errors import UserError
from optkit.machine import load, target
from optkit.machine.target import DATASHEETS, detect, get_target
from optkit.pipeline.records import RunRecord
from tests.support.sample_artifact import real_artifact


@pytest.fixture
def fast_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ceilings without measuring; the list counts how often they were asked for."""
    from optkit.machine import ceilings

    calls: list[int] = []
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    for name in ("fp32_flops", "int8_ops", "bf16_flops"):
        monkeypatch.setattr(ceilings, name, lambda: 1e9)
    monkeypatch.setattr(ceilings, "memory_bandwidth", lambda: float(len(calls) or calls.append(1) or 1))
    return calls


@pytest.mark.parametrize("name", sorted(DATASHEETS))
def test_data_sheet_rows_are_consistent(name: str) -> None:
    row = get_target(name)
    assert row.name == name and (name.startswith(f"{row.kind}-") or name == "rocm-mi300x")
    assert row.device == row.kind
    assert row.source == "datasheet"
    assert row.int8_ops >= 1.99 * row.bf16_flops > row.fp32_flops > row.memory_bandwidth


def test_get_target_names_the_nearest_when_the_name_is_unknown() -> None:
    with pytest.raises(UserError, match="did you mean 'cuda-h100'"):
        get_target("cuda-h10")


def test_detect_measures_once(fast_measurements: list[int]) -> None:
    first = detect()
    assert first == get_target("cpu")
    assert fast_measurements == [1]
    assert first.kind == "cpu"
    assert first.cores >= 1
    assert first.memory_bytes > 1 << 28


@pytest.mark.parametrize(("used", "warned"), [(0.9, True), (0.1, False), (None, False)])
def test_ceilings_measured_beside_other_work_are_warned_of(
    fast_measurements: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    used: float | None,
    warned: bool,
) -> None:
    monkeypatch.setattr(load, "cpu_in_use", lambda: used)
    detect()
    assert ("90% of the processors are in use" in caplog.text) is warned
    caplog.clear()
    detect()
    assert not caplog.text, "from the cache nothing is measured"


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"name": "cpu"}', '{"isa": 3}', "\x00"])
def test_detect_measures_again_when_the_cache_entry_is_damaged(
    fast_measurements: list[int], tmp_path: Path, content: str
) -> None:
    expected = detect()
    (entry,) = (tmp_path / "cache" / "targets").iterdir()
    entry.write_text(content)
    assert detect() == expected
    assert json.loads(entry.read_text())["name"] == "cpu"


def test_detect_measures_again_when_the_machine_is_another(
    fast_measurements: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    detect()
    monkeypatch.setattr(target, "cpu_model", lambda: "another CPU")
    detect()
    assert len(list((tmp_path / "cache" / "targets").iterdir())) == 2


def test_cpu_model_has_a_name_when_proc_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "_cpuinfo", dict)
    assert target.cpu_model()
    assert target.cpu_isa() == ()


GRAVITON3 = """processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd evtstrm aes crc32 atomics fphp asimdhp cpuid asimdrdm asimddp sve asimdfhm svei8mm i8mm bf16 rng
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: 0xd40
CPU revision\t: 1

processor\t: 1
CPU part\t: 0xd08
"""


@pytest.fixture
def cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function to put a text in place of ``/proc/cpuinfo``."""

    def put(text: str) -> None:
        file = tmp_path / "cpuinfo"
        file.write_text(text)
        monkeypatch.setattr(target, "Path", lambda _: file)

    return put


def test_cpu_facts_name_core_and_instructions_when_the_cpu_is_arm(cpuinfo: Callable[[str], None]) -> None:
    cpuinfo(GRAVITON3)
    assert target.cpu_model() == "Neoverse V1"
    assert target.cpu_isa() == ("asimd", "asimddp", "i8mm", "bf16", "sve")


@pytest.mark.parametrize(
    ("name", "shown"),
    [("AMD EPYC", "AMD EPYC, family 26 model 2"), ("AMD EPYC 9755 128-Core Processor",) * 2],
)
def test_cpu_model_adds_the_numbers_when_the_name_has_none(
    name: str, shown: str, cpuinfo: Callable[[str], None]
) -> None:
    cpuinfo(f"processor\t: 0\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: {name}\nstepping\t: 1\n")
    assert target.cpu_model() == shown


def test_cpu_model_gives_the_numbers_when_an_arm_core_is_unknown(cpuinfo: Callable[[str], None]) -> None:
    cpuinfo(GRAVITON3.replace("0xd40", "0xfff"))
    assert target.cpu_model() == "Arm core, implementer 0x41, part 0xfff"


def test_target_measures_bf16_when_an_arm_cpu_has_units(
    fast_measurements: list[int], cpuinfo: Callable[[str], None]
) -> None:
    cpuinfo(GRAVITON3)
    assert target._measured_target().bf16_flops > 0
    cpuinfo(GRAVITON3.replace(" bf16", ""))
    assert target._measured_target().bf16_flops == 0


def test_present_target_names_the_remedy_when_there_is_no_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    recipe = "schema_version: 1\nname: r\ntarget: cuda-h100\npasses: {}\n"
    artifact = Artifact.open(real_artifact(tmp_path / "a", tmp_path / "source", recipe, RunRecord([], None)))
    with pytest.raises(UserError, match="cuda-h100 and this machine has no CUDA GPU") as error:
        artifact.executable()
    assert error.value.where == str(tmp_path / "a") and "on a machine with an NVIDIA GPU" in error.value.fix


def test_the_version_of_torch_is_known_without_its_import() -> None:
    assert target.torch_version() == str(torch.__version__)
