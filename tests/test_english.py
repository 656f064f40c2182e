"""Docstrings in plain English: none opens with a question word, and pronouns are rare.

The bounds hold for each folder of modules by itself. Docstrings of functions and classes are counted apart from those
of modules.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from tools import structure

ROOT = Path(__file__).resolve().parents[1]
MAX_PRONOUNS = 2.0  # per 100 words; 1.4 to 1.7 in comparable projects
FOLDERS = structure.FOLDERS | {"bench": "bench", "tools": "tools", "tests/support": "tests.support"}


@cache
def by_folder(root: Path = ROOT) -> dict[str, list[structure.Module]]:
    """Modules by the folder that holds them."""
    found: dict[str, list[structure.Module]] = defaultdict(list)
    for module in structure.modules(root, FOLDERS):
        found[module.folder].append(module)
    return found


def problems(modules: list[structure.Module]) -> list[str]:
    """The docstrings of functions and classes of one folder that break the bounds, with file and line."""
    found = structure.question_openings(modules)
    if (density := structure.pronouns_per_100_words(modules)) > MAX_PRONOUNS:
        found += [f"{density:.1f} pronouns per 100 words:", *structure.pronoun_places(modules)]
    return found


def module_problems(modules: list[structure.Module]) -> list[str]:
    """The module docstrings of one folder that break the bounds."""
    texts = {module.path: ast.get_docstring(module.tree) or "" for module in modules}
    found = [f"{path}:1: {text[:80]}" for path, text in texts.items() if structure.QUESTION_WORDS.match(text)]
    if (density := structure.pronoun_density(texts.values())) > MAX_PRONOUNS:
        counts = {path: len(structure.PRONOUNS.findall(text)) for path, text in texts.items()}
        found += [f"{density:.1f} pronouns per 100 words:"]
        found += [f"{path}:1: {count}" for path, count in counts.items() if count]
    return found


def folders() -> list[str]:
    """The folders of modules, by name; nothing is parsed where tests are only collected."""
    paths = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return sorted({path.relative_to(ROOT).parent.as_posix() for path in paths})


@pytest.mark.parametrize("folder", folders())
def test_docstrings_of_a_folder_are_plain_english(folder: str) -> None:
    modules = by_folder()[folder]
    found = [*problems(modules), *module_problems(modules)]
    assert not found, "\n".join(found)


BAD = '''"""Whatever it is."""


def question():
    """Where the tokens go."""


def pronouns():
    """Return that one, as they do with these others."""
'''


def test_problems_names_file_and_line_when_docstrings_break_the_bounds(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "bad.py").write_text(BAD)
    modules = by_folder(tmp_path)["tools"]
    assert "tools/bad.py:4: Where the tokens go." in problems(modules)
    assert "tools/bad.py:8: that, one, they, these, others" in problems(modules)
    assert module_problems(modules)[0] == "tools/bad.py:1: Whatever it is."
