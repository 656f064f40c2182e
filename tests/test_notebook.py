"""The notebook in ``examples``: its cells run on a tiny model.

As by papermill, the cell with the tag ``parameters`` is followed by other values. The value of a cell's last line is
displayed as in a notebook, which calls ``_repr_html_``.
"""

from __future__ import annotations

import ast
import json
import runpy
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support.model_directory import save_model
from tests.support.quick import quick
from tests.support.tiny_tokenizer import TEMPLATE

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "examples" / "first-steps.ipynb"
PARAMETERS = 'MODEL, OUT, PROMPT_TOKENS, TEXT_TOKENS = "tiny", "made", 24, 1024'
PREAMBLE = """
import asyncio
def display(value):
    if value is None:
        return
    show = getattr(value, "_repr_html_", None)
    print("\\nDISPLAY", (show() if show else repr(value)).replace("\\n", " "))
"""


def cells() -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]


def program() -> str:
    """The code cells as a program, with the parameters of the test. An event loop runs, as it does in a notebook."""
    parts = []
    for cell in cells():
        parts.append(displaying("".join(cell["source"])))
        if "parameters" in cell["metadata"].get("tags", ()):
            parts.append(PARAMETERS)
    body = textwrap.indent("\n".join(parts), "    ")
    return f"{PREAMBLE}\nasync def notebook():\n{body}\n\nasyncio.run(notebook())\n"


def displaying(source: str) -> str:
    """``source`` with a call of ``display`` around the value of the last line."""
    tree = ast.parse(source)
    last = tree.body[-1]
    if isinstance(last, ast.Expr):
        last.value = ast.Call(ast.Name("display", ast.Load()), [last.value], [])
    return ast.unparse(ast.fix_missing_locations(tree))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with the tiny model."""
    model = save_model(tmp_path / "tiny")
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return tmp_path


def test_the_cells_run_in_order_and_display_their_results(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(directory)
    monkeypatch.setenv("OPTKIT_CACHE", str(directory / "cache"))
    quick(monkeypatch.setattr)
    (directory / "cells.py").write_text(program())
    runpy.run_path("cells.py")
    printed = capsys.readouterr().out
    shown = [line for line in printed.splitlines() if line.startswith("DISPLAY")]
    assert len(shown) == len([c for c in cells() if ends_with_a_value(c)]) - 1  # llm.close() shows nothing
    assert any("<td>fuse_qkv</td>" in line for line in shown)
    assert any("TTFT p50 ms" in line for line in shown)


def ends_with_a_value(cell: dict[str, Any]) -> bool:
    return isinstance(ast.parse("".join(cell["source"])).body[-1], ast.Expr)


def test_the_saved_outputs_name_no_place_of_a_machine() -> None:
    text = NOTEBOOK.read_text("utf-8")
    silent = [cell for cell in cells() if not cell["outputs"]]
    assert {"".join(cell["source"]) for cell in silent if ends_with_a_value(cell)} == {"llm.close()"}
    for place in ("/home/", "/root/", "/tmp/", "/Users/", "/work/"):
        assert place not in text
