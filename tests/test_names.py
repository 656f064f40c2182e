"""Names in backquotes, in docstrings and documents: each file, module, class and function exists.

Checked are paths and names of source files, dotted names below a package of the repository, and single words in
docstrings, which must be an identifier or a word of a string somewhere in the code. The changelog is not read: its
names are those of their time.
"""

from __future__ import annotations

import ast
import keyword
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import optkit
from optkit import plugins
from tests.support import checkout
from tests.support.checkout import ROOT
from tools import structure

FOLDERS = structure.FOLDERS | {"bench": "bench", "tools": "tools", "tests": "tests"}
SOURCE = re.compile(r"[\w./-]+\.(py|cpp|h)")
PLACEHOLDER = re.compile(r"[A-Z]{2,}")  # NAME, ARCH
DOTTED = re.compile(r"(optkit|bench|tests|tools)(\.[A-Za-z_]\w*)+")
WORD = re.compile(r"[a-z_]\w{2,}")
IN_DOCSTRING = re.compile(r"``([^`\n]+)``")
IN_DOCUMENT = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
KNOWN = {
    "aclose",
    "lc0",
    "prefetcht0",
    "ptxas",
    "raw_logprobs",
    "request_queue_time",
    "s_j",
    "s_k",
    "varlen_attn",
}


@dataclass(frozen=True)
class Source:
    """A module of the repository: dotted name, path, docstrings by line, and the words of the rest.

    Syntax trees are not kept: a million objects for all modules.
    """

    name: str
    path: Path
    docstrings: list[tuple[int, str]]
    words: set[str]


@cache
def sources() -> list[Source]:
    """All modules of the repository."""
    return [source_of(module) for module in structure.read(ROOT, FOLDERS)]


def source_of(module: structure.Module) -> Source:
    """The module without docstrings and comments in ``words``."""
    lines, docstrings = (ROOT / module.path).read_text("utf-8").splitlines(), []
    for node in structure.definitions(module.tree):
        text, first = ast.get_docstring(node), node.body[0] if node.body else None
        if text is not None and first is not None:
            docstrings.append((first.lineno, text))
            for line in range(first.lineno - 1, first.end_lineno or first.lineno):
                lines[line] = ""
    code = "\n".join(line.partition("# ")[0] for line in lines)
    return Source(module.name, module.path, docstrings, set(re.findall(r"\w+", code)))


@cache
def files() -> set[str]:
    """Paths of all source files, with and without leading folders."""
    found = set()
    for path in checkout.files(".py", ".cpp", ".h"):
        parts = path.relative_to(ROOT).parts
        found |= {"/".join(parts[start:]) for start in range(len(parts))}
    return found


@cache
def identifiers() -> dict[str, set[str]]:
    """The words of the code of each module, without docstrings and comments, by module name."""
    return {
        module.name: module.words for module in sources() if module.name != __name__
    }  # KNOWN is no evidence


@cache
def vocabulary() -> set[str]:
    """All identifiers and words of strings, the names of modules, and the words of C++, YAML and Make files."""
    modules = (module.name.split(".") for module in sources())
    found = set(keyword.kwlist).union(*identifiers().values(), *modules)
    for folder in (ROOT / "kernels", ROOT / "recipes", ROOT / "tests" / "native"):
        for path in folder.rglob("*"):
            if path.suffix in (".cpp", ".h", ".yaml"):
                found |= set(re.findall(r"\w+", path.read_text("utf-8")))
    return found | KNOWN


def is_dangling(name: str, is_docstring: bool) -> bool:
    """Return True for a name without a counterpart in the repository."""
    if SOURCE.fullmatch(name):
        return name not in files() and not PLACEHOLDER.search(name)
    if DOTTED.fullmatch(name):
        return not resolves(name)
    return is_docstring and bool(WORD.fullmatch(name)) and name not in vocabulary()


def resolves(name: str) -> bool:
    """Return True for a module, or for a module followed by identifiers of the module.

    Names of the Python API are attributes of the package, and groups of entry points are named like modules.
    """
    if name in plugins.GROUPS or name.split(".")[1] in optkit.__all__:
        return True
    modules = identifiers()
    module = structure.nearest(name, {*modules, "optkit.recipes"})
    rest = name.removeprefix(module).strip(".").split(".") if name != module else []
    package = "." not in module
    return bool(module) and not (package and rest) and all(part in modules[module] for part in rest)


def dangling(text: str, is_docstring: bool) -> list[str]:
    """The names in backquotes in ``text`` without a counterpart."""
    names = (IN_DOCSTRING if is_docstring else IN_DOCUMENT).findall(text)
    return [name for name in names if is_dangling(name, is_docstring)]


def documents() -> list[Path]:
    """All Markdown files but the changelog."""
    return [file for file in checkout.files(".md") if file.name != "CHANGELOG.md"]


def test_names_in_docstrings_exist() -> None:
    found = [
        f"{module.path}:{line}: {name}"
        for module in sources()
        for line, text in module.docstrings
        for name in dangling(text, is_docstring=True)
    ]
    assert found == []


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_names_in_a_document_exist(document: Path) -> None:
    assert dangling(FENCE.sub("", document.read_text("utf-8")), is_docstring=False) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("optkit.graph.ir.Graph", False),
        ("optkit.graph.ir.NoSuchClass", True),
        ("optkit.no_such_package.Graph", True),
        ("optkit/graph/ir.py", False),
        ("no_such_module.py", True),
        ("passes/NAME.py", False),
        ("run_pass", False),
        ("no_such" + "_function", True),
    ],
)
def test_is_dangling_holds_for_names_without_a_counterpart(name: str, expected: bool) -> None:
    assert is_dangling(name, is_docstring=True) is expected
