"""The command line: exit codes, panels, and a help text that does not wait for torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer import Typer

from optkit import __version__
from optkit.artifact.staging import staging
from optkit.cli import main
from optkit.errors import UserError


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> dict[str, BaseException]:
    """An app whose one command raises what the test puts into the dict."""
    box: dict[str, BaseException] = {}
    app = Typer(add_completion=False, pretty_exceptions_enable=False)

    @app.callback()
    def root() -> None:
        pass

    @app.command()
    def fail() -> None:
        raise box["error"]

    monkeypatch.setattr(main, "application", lambda _names: app)
    return box


def test_recipe_list_imports_no_torch_and_no_other_command() -> None:
    code = (
        "import sys; from optkit.cli.main import run; code = run(['recipe', 'list']);"
        "other = {'torch', 'optkit.cli.serve', 'optkit.cli.bench'} & set(sys.modules);"
        "sys.exit(f'imported: {other}' if other else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [["-h", "serve"], ["--debug", "--help", "recipe"], ["--help"], []])
def test_help_before_a_command_lists_all_commands(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main.run(arguments)
    shown = "".join(capsys.readouterr())
    assert all(f"  {name} " in shown for name in main.COMMANDS)


def test_an_unknown_command_is_told_a_near_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["srve"]) == 2
    assert "serve" in capsys.readouterr().err


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out == f"optkit {__version__}\n"


@pytest.mark.parametrize("arguments", [["nonsense"], ["recipe", "shw"], ["recipe", "show"], ["--nope"]])
def test_run_exits_with_2_when_arguments_are_wrong(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "Traceback" not in output.err


def test_run_prints_a_panel_and_exits_with_2_when_a_user_error_is_raised(
    failing: dict[str, BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    failing["error"] = UserError("no [bold]such file", where="a.yaml:3", fix="look again")
    assert main.run(["fail"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    for part in ("no [bold]such file", "a.yaml:3", "look again"):
        assert part in output.err
    assert "Traceback" not in output.err


def test_run_prints_a_short_panel_and_exits_with_1_when_there_is_a_bug(
    failing: dict[str, BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    failing["error"] = KeyError("secret")
    assert main.run(["fail"]) == 1
    error = capsys.readouterr().err
    assert "bug in optkit" in error
    assert "--debug" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("arguments", [["--debug", "fail"], ["fail", "--debug"]])
def test_run_shows_the_traceback_when_debug_stands_anywhere(
    arguments: list[str], failing: dict[str, BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    failing["error"] = KeyError("secret")
    assert main.run(arguments) == 1
    assert "Traceback" in capsys.readouterr().err


def test_run_exits_with_130_when_interrupted(failing: dict[str, BaseException]) -> None:
    failing["error"] = KeyboardInterrupt()
    assert main.run(["fail"]) == 130


def test_run_cleans_up_and_exits_with_143_when_terminated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def write() -> None:
        with staging(tmp_path / "out", force=False) as directory:
            (directory / "half").write_text("")
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    monkeypatch.setattr(main, "application", lambda names: lambda *arguments, **options: write())
    assert main.run(["fail"]) == 143
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


FULL = Path("/dev/full")  # a device without room for a single byte


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(
    "arguments", [["--version"], ["recipe", "list"], ["recipe", "show", "ttft-cpu", "--json"]]
)
def test_a_full_disk_is_an_error_of_the_user_when_output_is_written(arguments: list[str]) -> None:
    with FULL.open("w") as full:
        done = optkit(arguments, stdout=full, stderr=subprocess.PIPE)
    room = "make room on the disks of the output and of the cache (OPTKIT_CACHE)"
    assert (done.returncode, done.stderr) == (2, f"error: No space left on device. {room}.\n")


def optkit(arguments: list[str], **streams: Any) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own."""
    command = [sys.executable, "-m", "optkit.cli.main", *arguments]
    return subprocess.run(command, text=True, timeout=60, check=False, **streams)


@pytest.mark.parametrize("arguments", [["serve", "--help"], ["recipe", "schema"], ["recipe", "list"]])
def test_a_command_ends_without_a_message_when_the_reader_of_its_output_has_gone(
    arguments: list[str],
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = optkit(arguments, stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
