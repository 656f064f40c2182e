"""Names in backquotes, in docstrings and documents: each file, module, class and function exists.

Checked are paths and names of source files, dotted names below a package of the repository, and single words in
docstrings, which must be an identifier or a word of a string somewhere in the code. The changelog is not read: its
names are those of their time.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import optkit
from optkit import plugins
from tools import structure

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = structure.FOLDERS | {"bench": "bench", "tools": "tools", "tests": "tests"}
SKIPPED = {".venv", ".peers", ".clients", ".agents", ".git", ".ci", "build", "artifact"}  # at the top
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


@cache
def sources() -> list[structure.Module]:
    """All modules of the repository."""
    return structure.modules(ROOT, FOLDERS)


@cache
def files() -> set[str]:
    """Paths of all source files, with and without leading folders."""
    found = set()
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        if path.suffix in (".py", ".cpp", ".h") and parts[0] not in SKIPPED:
            found |= {"/".join(parts[start:]) for start in range(len(parts))}
    return found


@cache
def identifiers() -> dict[str, set[str]]:
    """The words of the code of each module, without docstrings and comments, by module name."""
    modules = [module for module in sources() if module.name != __name__]  # KNOWN is no evidence
    return {module.name: set(re.findall(r"\w+", code_of(module))) for module in modules}


def code_of(module: structure.Module) -> str:
    """The source text of a module without docstrings and comments."""
    lines = (ROOT / module.path).read_text("utf-8").splitlines()
    for node in docstring_nodes(module.tree):
        for line in range(node.lineno - 1, node.end_lineno or node.lineno):
            lines[line] = ""
    return "\n".join(line.partition("# ")[0] for line in lines)


def docstring_nodes(tree: ast.Module) -> Iterator[ast.expr]:
    """The expressions that are docstrings."""
    kinds = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            if isinstance(first, ast.Expr):
                yield first.value


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
    found = sorted(ROOT.rglob("*.md"))
    return [f for f in found if f.relative_to(ROOT).parts[0] not in SKIPPED and f.name != "CHANGELOG.md"]


def test_names_in_docstrings_exist() -> None:
    found = [
        f"{module.path}:{line}: {name}"
        for module in sources()
        for line, text in [*module.docstrings, (1, ast.get_docstring(module.tree) or "")]
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
