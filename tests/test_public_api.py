"""``import optkit``: cheap, complete, and each name where it is documented."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import optkit

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "python.md").read_text("utf-8")


@pytest.mark.parametrize("name", optkit.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    found = getattr(optkit, name)
    assert found is not None
    if not name.startswith("__"):
        assert re.search(rf"\b{name}\b", PAGE), f"docs/python.md does not name optkit.{name}"
    assert name in dir(optkit)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'optkit' has no attribute 'optimise'"):
        _ = optkit.optimise  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["optimize", "load", "bench", "recipe", "tune"])
def test_every_argument_of_a_function_is_in_its_docstring(name: str) -> None:
    function = inspect.unwrap(
        getattr(__import__(f"optkit.api.{'llm' if name == 'load' else name}", fromlist=["x"]), name)
    )
    text = inspect.getdoc(function) or ""
    for argument in inspect.signature(function).parameters:
        assert re.search(rf"\b{argument}\b.*:", text), argument


CHEAP = """
import sys, optkit
heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'typer', 'rich'}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
try:
    optkit.nothing
except AttributeError:
    pass
optkit.UserError
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""


def test_the_import_and_the_errors_need_no_library() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHEAP], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
