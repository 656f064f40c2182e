"""Help texts: complete option names, no torch, whole sentences in the list of commands."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import typer

from optkit.cli import main


def test_help_lists_the_commands_and_imports_no_torch() -> None:
    code = (
        "import sys; from optkit.cli.main import run; code = run(['--help']);"
        "heavy = {'torch', 'transformers', 'numpy', 'fastapi', 'safetensors'} & set(sys.modules);"
        "sys.exit(f'imported: {heavy}' if heavy else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    for command in ("recipe", "doctor"):
        assert command in done.stdout


COMMANDS = [*main.COMMANDS, *(f"recipe {name}" for name in ("list", "check", "new", "show", "schema"))]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_is_complete_when_the_terminal_is_narrow(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main.run([*name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert "\u2026" not in shown and max(map(len, shown.splitlines())) <= 80
    words = "".join(shown.split())
    for option in parameters(name):
        assert all(text in shown for text in option.opts if option.param_type_name == "option")
        assert "".join((getattr(option, "help", None) or "").split()) in words  # lines may end after a hyphen


def parameters(name: str) -> list[Any]:
    """The options and arguments of a command."""
    command = typer.main.get_command(main.application())
    for part in name.split():
        command = command.commands[part]  # type: ignore[attr-defined]
    return command.params


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_arguments_in_capitals_and_values_by_one_word(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main.run([*name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    usage, _, rest = shown.partition("\n")
    for argument in parameters(name):
        if argument.param_type_name == "argument":
            assert argument.name.upper() in re.split(r"[\s\[\].]+", usage)
            assert f"\n  {argument.name.upper()}  " in rest
    assert not re.search(r"[{}]| range>|<list", shown)
    assert not [line for line in shown.splitlines() if line.endswith("-")]


def test_missing_argument_is_named_as_in_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["verify"]) == 2
    assert re.search(
        r"verify \[OPTIONS\] ARTIFACT\n(.*\n)*.*Missing argument 'ARTIFACT'", capsys.readouterr().err
    )


def test_summary_of_a_command_is_a_whole_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--help"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert (
        "Measure latency and throughput over HTTP, and compare with the unoptimized model or any other side."
        in words
    )
