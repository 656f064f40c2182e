from __future__ import annotations

from pathlib import Path

import pytest

from tools import structure

FILES = {
    "optkit/__init__.py": "",
    "optkit/low.py": 'def f():\n    """Return it, as they do."""\n',
    "optkit/middle.py": "def f():\n    from optkit import low\n",
    "optkit/graph/__init__.py": "",
    "optkit/graph/a.py": "from optkit.graph import b\nfrom optkit import middle\n",
    "optkit/graph/b.py": "import optkit.graph.a\n",
    "optkit/typed.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from optkit.graph import a\n",
    "passes/one.py": 'class One:\n    """What one does."""\n',
    "kernels/ops/__init__.py": "",
    "tests/test_low.py": "",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_measure_counts_the_files_of_a_small_tree(root: Path) -> None:
    figures = structure.measure(root)
    assert figures["files"] == 9
    assert figures["modules flat at the top"] == 3
    assert figures["functions"] == 2
    assert figures["modules with a test of their stem"] == "1 of 2"  # the others have no function


def test_measure_finds_a_cycle_of_modules_and_counts_it_as_one_level(root: Path) -> None:
    figures = structure.measure(root)
    assert figures["cycles of modules"] == [["optkit.graph.a", "optkit.graph.b"]]
    assert figures["cycles of units"] == []
    assert figures["levels of units"] == 3  # graph, middle, low


def test_imports_counts_function_imports_and_leaves_out_type_checking(root: Path) -> None:
    found = {module.name: module for module in structure.modules(root)}
    assert structure.imports(found["optkit.middle"], set(found)) == {"optkit.low"}
    assert structure.imports(found["optkit.typed"], set(found)) == set()


def test_docstring_figures_find_question_words_and_pronouns(root: Path) -> None:
    found = structure.modules(root)
    assert structure.question_openings(found) == ["passes/one.py:1: What one does."]
    assert structure.pronouns_per_100_words(found) == pytest.approx(100 * 3 / 8)


def test_untested_leaves_out_modules_without_functions_to_call(root: Path) -> None:
    sources = {
        "data.py": "A = 1\nclass B:\n    c: int\n",
        "protocol.py": 'class P:\n    def f(self):\n        """Do."""\n        ...\n',
        "kernel.py": "@triton.jit\ndef f(x):\n    return x\n@triton.jit(debug=True)\ndef g(x):\n    return x\n",
        "launch.py": "@triton.jit\ndef f(x):\n    return x\n\ndef g(x):\n    f[1](x)\n",
    }
    for name, text in sources.items():
        (root / "optkit" / name).write_text(text)
    found = structure.untested(structure.modules(root), root / "tests")
    assert found == ["optkit.launch", "optkit.middle"]
