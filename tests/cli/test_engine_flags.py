"""Flags of ``optkit serve`` that are made from the engine's options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from optkit.cli.engine_flags import cli_type, parsed, with_engine_flags
from optkit.cli.main import run
from optkit.errors import UserError


def command(artifact: str, port: int = 1, **engine: Any) -> None:
    """Record the call."""
    CALLS.append((artifact, port, engine))


CALLS: list[Any] = []


def test_only_given_options_reach_the_command() -> None:
    app, marked = typer.Typer(), annotated(command)
    app.command()(with_engine_flags(marked))
    CALLS.clear()
    app(
        ["here", "--max-num-seqs", "4", "--kv-cache-bytes", "1MiB", "--no-enforce-ttft-slo"],
        standalone_mode=False,
    )
    app(["there"], standalone_mode=False)
    given = {"max_num_seqs": 4, "kv_cache_bytes": 1 << 20, "enforce_ttft_slo": False}
    assert [("here", 1, given), ("there", 1, {})] == CALLS


def annotated(function: Any) -> Any:
    typed = {"artifact": (str, typer.Argument()), "port": (int, typer.Option())}
    function.__annotations__ |= {name: Annotated[kind, mark] for name, (kind, mark) in typed.items()}
    return function


def test_sizes_and_paths_are_parsed() -> None:
    assert parsed("kv_cache_bytes", "2KiB") == 2048 and cli_type("kv_cache_bytes") is str
    assert parsed("kv_offload_dir", Path("x")) == str(Path("x").absolute())
    with pytest.raises(UserError, match="a size is a number of bytes"):
        parsed("kv_offload_bytes", "1 elephant")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--max-num-seq", "4"), "No such option"),
        (("--max-num-seqs", "0"), "greater than or equal to 1|0 is not in the range"),
        (("--scheduling-policy", "lifo"), "--scheduling-policy: .*'lifo'"),
        (("--ttft-slo-ms", "0"), "--ttft-slo-ms: "),
    ],
)
def test_a_misspelt_or_wrong_flag_is_an_error_before_anything_starts(
    option: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", "/nowhere", *option]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    "flag",
    [
        "--scheduling-policy <fcfs|slo>",
        "--ttft-slo-ms <milliseconds>",
        "--kv-cache-bytes <bytes>",
        "--queue-timeout <seconds>",
        "--gpu-memory-utilization <float>",
    ],
)
def test_help_shows_the_choices_or_the_unit_of_a_value(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--help"]) == 0
    assert flag in capsys.readouterr().out
