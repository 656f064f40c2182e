"""The native library: which file is loaded, and what users see where it is missing."""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from optkit.cli.doctor import native_kernels
from optkit.cli.main import run
from optkit.errors import UserError
from optkit.kernels.cpu import native
from optkit.runtime.factory import warn_about_kernels

BUILT = native.library_file()
needs_native = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in which the library is looked for."""
    monkeypatch.setattr(native, "FILE", tmp_path / native.FILE.name)
    monkeypatch.delenv(native.LIBRARY_VARIABLE, raising=False)
    forget()
    yield tmp_path
    monkeypatch.undo()
    forget()


def forget() -> None:
    """Have the library looked for again."""
    native.library.cache_clear()
    native.missing_reason.cache_clear()


@needs_native
def test_library_is_the_file_that_the_variable_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = folder / "chosen.so"
    shutil.copy(BUILT, chosen)
    monkeypatch.setenv("OPTKIT_NATIVE_LIBRARY", str(chosen))
    assert native.available()
    assert str(chosen) in Path("/proc/self/maps").read_text()


def test_library_names_the_file_of_the_variable_where_it_is_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTKIT_NATIVE_LIBRARY", str(folder / "chosen.so"))
    assert "chosen.so was not built" in str(native.missing_reason())


def test_library_is_not_that_of_an_older_build(folder: Path) -> None:
    (folder / "_native.cpython-311-x86_64-linux-gnu.so").write_bytes(b"left over")
    assert not native.available()
    assert "_native.so was not built" in str(native.missing_reason())


@needs_native
def test_library_loads_beside_an_older_build(folder: Path) -> None:
    shutil.copy(Path(native.__file__).with_name("_native.so"), folder)
    (folder / "_native.cpython-311-x86_64-linux-gnu.so").write_bytes(b"left over")
    assert native.missing_reason() is None


def test_missing_reason_of_a_damaged_library_names_the_file_and_the_fix(folder: Path) -> None:
    (folder / "_native.so").write_bytes(b"no library")
    reason = str(native.missing_reason())
    assert "_native.so does not load" in reason and "C++ compiler" in reason


@pytest.mark.usefixtures("folder")
def test_optimize_warns_in_one_line_without_native_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["optimize", str(tmp_path / "nowhere"), "-r", "ttft-cpu"]) == 2
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("warning: native kernels are missing") and "C++ compiler" in first


@pytest.mark.usefixtures("folder")
def test_optimize_for_a_gpu_does_not_warn_of_cpu_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["optimize", str(tmp_path / "nowhere"), "-r", "ttft-h100"]) == 2
    assert "native kernels" not in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_the_engine_warns_without_native_kernels(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.WARNING):
        warn_about_kernels(tmp_path)
    assert "native kernels are missing" in caplog.text and "C++ compiler" in caplog.text


@needs_native
def test_the_engine_does_not_warn_with_native_kernels(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    warn_about_kernels(tmp_path)
    assert caplog.text == ""


@pytest.mark.usefixtures("folder")
def test_doctor_says_why_native_kernels_are_missing() -> None:
    assert "was not built" in native_kernels()["missing"]


@needs_native
def test_a_set_that_the_cpu_lacks_is_refused_with_those_that_it_has() -> None:
    usable = native.usable_isas()
    missing = [name for name in native.isas(native.library()) if name not in usable]
    if not missing:
        pytest.skip("this CPU has all")
    with pytest.raises(UserError, match=f"this CPU has no {missing[0]}") as refused:
        native.set_isa(missing[0])
    assert str(refused.value.fix) == f"take one of {', '.join(usable)}"
    assert native.usable_isas() == usable


@needs_native
def test_doctor_says_which_instruction_set_runs_and_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, "portable")
    native.library.cache_clear()
    try:
        assert run(["doctor"]) == 0
    finally:
        monkeypatch.undo()
        native.library.cache_clear()
        native.set_isa(None)
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if line.startswith("native kernels")]
    assert "run as portable, set by OPTKIT_CPU_ISA" in row
    (row,) = [line for line in lines if line.startswith("not measured")]
    assert all(isa in row for isa in native.unmeasured_isas()) and "avx2" not in row


@needs_native
def test_unmeasured_instruction_sets_are_those_marked_in_the_list() -> None:
    rows = re.findall(
        r"^ISA\((\w+), (\w+), ([01])\)$", (native.FILE.parent / "isas.h").read_text(), re.MULTILINE
    )
    assert [name for name, _, _ in rows] == native.isas(native.library())
    assert [name for name, _, measured in rows if measured == "0"] == native.unmeasured_isas()
    assert {base for _, base, _ in rows} < {name for name, _, _ in rows}


def test_the_library_is_hashed_once_a_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = tmp_path / "native.so"
    library.write_bytes(b"code")
    monkeypatch.setattr(native, "library_file", lambda: library)
    native.library_digest.cache_clear()
    first = native.library_digest()
    monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail("hashed again"))
    assert native.library_digest() == first == hashlib.sha256(b"code").hexdigest()
    native.library_digest.cache_clear()
