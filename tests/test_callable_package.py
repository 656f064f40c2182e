"""Packages that are functions, too."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import optkit
import optkit.recipe.load
from optkit.api.bench import bench
from optkit.api.recipe import recipe
from optkit.api.tune import tune


@pytest.mark.parametrize(("name", "function"), [("bench", bench), ("recipe", recipe), ("tune", tune)])
def test_a_package_is_called_like_the_function_of_its_name(name: str, function: object) -> None:
    package = getattr(optkit, name)
    assert package is sys.modules[f"optkit.{name}"]
    assert inspect.signature(package) == inspect.signature(function)  # type: ignore[arg-type]


def test_a_call_of_a_package_is_a_call_of_the_function_however_it_was_imported() -> None:
    assert optkit.recipe("baseline") == recipe("baseline") == optkit.recipe.load.load_recipe("baseline")
    code = "import optkit.recipe.load, optkit; print(optkit.recipe('baseline').name)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "baseline\n"
