"""Every table keeps the full text of its cells, in a pipe and in a terminal of 80 columns."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from optkit.bench.result import BenchResult
from optkit.bench.table import table as bench_table
from optkit.cli import doctor, recipe
from optkit.cli.eval import table as eval_table
from optkit.cli.inspect import bounds_table, files_table
from optkit.cli.optimize import _prediction_table
from optkit.cli.tables import print_table
from optkit.pipeline.records import RunRecord
from optkit.pipeline.report import compiled_table, run_table
from optkit.recipe.load import list_recipes
from tests.support.sample_artifact import int8_record, timing

ROOT = Path(__file__).resolve().parents[2]
LABELS = ("prefill 512", "prefill 2048", "decode 512", "decode 2048")
VARIANT = {"tokens": "1 to 2048", "compiled_seconds": 12.5, "uncompiled_seconds": 0.25, "kept": False}


def run_of_long_names() -> Table:
    pair = [timing(12.0), timing(3.0)]
    measured, predicted = dict.fromkeys(LABELS, pair), {label: [12.0, 4.0] for label in LABELS}
    records = [
        int8_record(name=name, decision=decision, measured=measured, predicted=predicted)
        for name, decision in (("fuse_add_rms_norm", "rolled back"), ("mixed_precision", "reduced"))
    ]
    return run_table(RunRecord(records, records[0]))


def benchmark() -> Table:
    saved = ROOT / "bench" / "results" / "ttft-cpu-smollm2-135m.json"
    return bench_table(BenchResult.from_dict(json.loads(saved.read_text())))


def predictions() -> Table:
    times = dict.fromkeys(LABELS, (2.0, 1234.5))
    plan = {
        "baseline": dict.fromkeys(LABELS, 9876.5),
        "passes": [{"name": "fuse_add_rms_norm", "predicted": times}],
    }
    return _prediction_table(plan)


def bounds() -> Table:
    return bounds_table(
        [{"of": "mixed_precision", "bound": "max_memory_bytes", "limit": 2e8, "measured": None}]
    )


def files() -> Table:
    name = "optkit/native/a-file-with-a-very-long-name-that-no-terminal-of-eighty-columns-has-room-for.so"
    return files_table({name: {"bytes": 123456789, "sha256": "0123456789abcdef" * 4}})


def variants() -> Table:
    return compiled_table([VARIANT | {"reason": "uncompiled was faster in every round of the measurement"}])


def evaluation() -> Table:
    return eval_table(
        [("ln(PPL model / PPL source), paired (steps of more than 128 tokens)", "0.00123 ± 0.00045")]
    )


def packages() -> Table:
    facts = {
        "packages": dict.fromkeys(("torch", "transformers", "huggingface-hub"), "12.345.6789+cpu.abcdefgh")
    }
    return doctor.table(
        [("packages", doctor.versions(facts["packages"])), ("cache", "/" + "long/[path]/" * 12)]
    )


TABLES: dict[str, Callable[[], Table]] = {
    "optimize and inspect": run_of_long_names,
    "optimize --dry-run": predictions,
    "rebuild": variants,
    "inspect bounds": bounds,
    "inspect files": files,
    "bench": benchmark,
    "eval": evaluation,
    "recipe list": lambda: recipe.table(list_recipes()),
    "doctor": packages,
}


def printed(table: Table, *, terminal: bool, width: int = 80) -> str:
    stream = io.StringIO()
    output = Console(
        file=stream,
        width=width,
        force_terminal=terminal,
        color_system=None,
        markup=False,
        emoji=False,
        highlight=False,
    )
    print_table(table, output)
    return stream.getvalue()


def cells(table: Table) -> list[str]:
    return [str(cell) for column in table.columns for cell in (column.header, *column.cells) if str(cell)]


def text_of(cell: str) -> str:
    return " ".join(cell.split())


@pytest.mark.parametrize("name", TABLES)
def test_print_table_shows_each_row_in_a_line_outside_a_terminal(name: str) -> None:
    table = TABLES[name]()
    lines = printed(table, terminal=False).splitlines()
    for cell in cells(TABLES[name]()):
        assert any(cell in line for line in lines), cell
    assert not any(line.endswith(" ") for line in lines)
    for number in range(table.row_count):
        row = [str(list(column.cells)[number]) for column in table.columns]
        assert any(all(cell in line for cell in row) for line in lines), row


@pytest.mark.parametrize("width", [40, 80, 100])
@pytest.mark.parametrize("name", TABLES)
def test_print_table_keeps_every_word_in_a_terminal(name: str, width: int) -> None:
    shown = printed(TABLES[name](), terminal=True, width=width)
    assert "…" not in shown
    words = shown.split()
    for cell in cells(TABLES[name]()):
        for word in cell.split():
            assert word in words, (word, cell)


@pytest.mark.parametrize("name", TABLES)
def test_print_table_stays_within_the_terminal_unless_a_word_is_longer(name: str) -> None:
    longest = max(len(word) for cell in cells(TABLES[name]()) for word in cell.split())
    widest = max(map(len, printed(TABLES[name](), terminal=True).splitlines()))
    assert widest <= max(80, longest + 40)


def test_print_table_is_a_grid_where_the_terminal_is_wide_enough() -> None:
    shown = printed(TABLES["optimize and inspect"](), terminal=True, width=400).splitlines()
    assert shown[0].split()[:2] == ["pass", "decision"]


def test_print_table_wraps_the_last_column_between_words() -> None:
    table = Table("name", "text", box=None, pad_edge=False)
    table.add_row("a", "word " * 40)
    shown = printed(table, terminal=True).splitlines()
    assert shown[0].split() == ["name", "text"] and len(shown) == 4


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("width", [30, 80])
def test_print_table_takes_no_text_for_markup(terminal: bool, width: int) -> None:
    table = Table("[bold]head", "b", title="optkit[title]", caption=":smile: [x]", box=None)
    table.add_row("pip install 'optkit[serve]'", "/data/[models]/:rocket:/a")
    shown = printed(table, terminal=terminal, width=width)
    for text in (
        "[bold]head",
        "optkit[title]",
        ":smile: [x]",
        "'optkit[serve]'",
        "/data/[models]/:rocket:/a",
    ):
        assert text in shown
