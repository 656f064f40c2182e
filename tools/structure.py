"""Measure the shape of the source tree: sizes, import order, docstrings, tests by name.

The figures are counts over the syntax trees of ``optkit``, ``passes`` and ``kernels/ops`` (imported as ``optkit``,
``optkit.passes`` and ``optkit.kernels``); nothing is imported or run. A *unit* is a module or a package directly
below ``optkit``. Imports inside functions count, imports under ``TYPE_CHECKING`` do not.

    python -m tools.structure            # a table
    python -m tools.structure --json     # the same figures for a script
    python -m tools.structure --list question   # the docstrings behind one figure
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import signal
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FOLDERS = {"optkit": "optkit", "passes": "optkit.passes", "kernels/ops": "optkit.kernels"}
LONG_FUNCTION = 40  # lines
QUESTION_WORDS = re.compile(r"(What|Who|Whom|Whose|How|Where|Whether|Why|Whatever|Which)\b")
PRONOUNS = re.compile(
    r"\b(it|its|itself|they|them|themselves|that|this|these|those|one|ones|others|such)\b", re.IGNORECASE
)

Definition = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
BLOCKS = ("body", "orelse", "handlers", "finalbody", "cases")  # the fields of nodes that hold statements


@dataclass(frozen=True)
class Module:
    """A source file: dotted name, path and syntax tree."""

    name: str
    path: Path
    tree: ast.Module
    num_lines: int

    @property
    def unit(self) -> str:
        """The module or package directly below ``optkit`` with the source file."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else "optkit"

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        return [n for n in definitions(self.tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]

    @cached_property
    def docstrings(self) -> list[tuple[int, str]]:
        """Line and text of the docstrings of functions and classes."""
        nodes = [n for n in definitions(self.tree) if not isinstance(n, ast.Module)]
        return [(n.lineno, text) for n in nodes if (text := ast.get_docstring(n))]

    @property
    def folder(self) -> str:
        """The folder of the file, relative to the root."""
        return self.path.parent.as_posix()


def modules(root: Path, folders: Mapping[str, str] = FOLDERS) -> list[Module]:
    """The modules of the source ``folders`` (path to package name), sorted by name."""
    return sorted(read(root, folders), key=lambda module: module.name)


def read(root: Path, folders: Mapping[str, str]) -> Iterator[Module]:
    """The modules of ``folders``, each parsed when its turn comes."""
    for folder, package in folders.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = list(path.relative_to(root / folder).with_suffix("").parts)
            name = ".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])
            text = path.read_text("utf-8")
            yield Module(name, path.relative_to(root), ast.parse(text), text.count("\n"))


def definitions(node: ast.AST) -> Iterator[Definition]:
    """The modules, functions and classes at ``node`` and below, in order; expressions are not looked at."""
    if isinstance(node, Definition):
        yield node
    for block in BLOCKS:
        for statement in getattr(node, block, ()):
            yield from definitions(statement)


def imports(module: Module, names: set[str]) -> set[str]:
    """Names of the modules in ``names`` imported by ``module`` at run time."""
    found = set()
    for node in run_time_nodes(module.tree):
        if isinstance(node, ast.Import):
            found |= {nearest(alias.name, names) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {nearest(f"{node.module}.{alias.name}", names) for alias in node.names}
    return {name for name in found if name and name != module.name}


def run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes of ``tree`` outside of ``if TYPE_CHECKING:``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield node
        yield from run_time_nodes(node)


def nearest(name: str, names: set[str]) -> str:
    """``name`` or the closest parent of ``name`` in ``names``; empty without a match."""
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of at least two nodes (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph[node]:
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            found.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return [component for component in found if len(component) > 1]


def num_levels(graph: dict[str, set[str]]) -> int:
    """The length of the longest import chain; a cycle counts as a single node."""
    of = {name: component[0] for component in cycles(graph) for name in component}
    merged: dict[str, set[str]] = defaultdict(set)
    for name, targets in graph.items():
        here = of.get(name, name)
        merged[here] |= {of.get(t, t) for t in targets} - {here}
    depth: dict[str, int] = {}

    def measure(name: str) -> int:
        if name not in depth:
            depth[name] = 1 + max((measure(t) for t in merged[name]), default=0)
        return depth[name]

    return max(map(measure, list(merged)), default=0)


def words(text: str) -> int:
    return len(re.findall(r"[A-Za-z][A-Za-z'-]*", text))


def num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def question_openings(found: list[Module]) -> list[str]:
    """Places of docstrings with a question word at the start."""
    return [
        f"{module.path}:{line}: {text.splitlines()[0]}"
        for module in found
        for line, text in module.docstrings
        if QUESTION_WORDS.match(text)
    ]


def pronouns_per_100_words(found: list[Module]) -> float:
    """Density of pronouns in the docstrings of functions and classes."""
    return pronoun_density(text for module in found for _, text in module.docstrings)


def pronoun_density(texts: Iterable[str]) -> float:
    """Pronouns per 100 words over all ``texts``; 0 without words."""
    joined = "\n".join(texts)
    return 100 * len(PRONOUNS.findall(joined)) / max(1, words(joined))


def pronoun_places(found: list[Module]) -> list[str]:
    """Places of docstrings with pronouns: path, line and the pronouns, most pronouns first."""
    rows = [
        (PRONOUNS.findall(text), f"{module.path}:{line}")
        for module in found
        for line, text in [*module.docstrings, (1, ast.get_docstring(module.tree) or "")]
    ]
    rows.sort(key=lambda row: -len(row[0]))
    return [f"{place}: {', '.join(pronouns)}" for pronouns, place in rows if pronouns]


def testable(found: list[Module]) -> list[Module]:
    """Modules with functions of their own: types, protocols, data and kernels that other modules launch have none."""
    named = [module for module in found if module.path.stem not in ("__init__", "__main__")]
    return [module for module in named if any(map(is_callable, module.functions))]


def is_callable(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """False for a declaration in a protocol, with ``...`` as its last statement, and for a Triton kernel."""
    decorators = {ast.unparse(decorator).partition("(")[0] for decorator in function.decorator_list}
    return ast.unparse(function.body[-1]) != "..." and "triton.jit" not in decorators


def untested(found: list[Module], tests: Path) -> list[str]:
    """Modules with functions and without a ``test_<stem>.py`` in ``tests``."""
    stems = {path.stem.removeprefix("test_") for path in tests.rglob("test_*.py")}
    return [module.name for module in testable(found) if module.path.stem not in stems]


def measure(root: Path) -> dict[str, object]:
    """All figures of the tree below ``root``."""
    found = modules(root)
    names = {module.name for module in found}
    by_module = {module.name: imports(module, names) for module in found}
    by_unit: dict[str, set[str]] = defaultdict(set)
    for module in found:
        units = {target.split(".")[1] for target in by_module[module.name] if "." in target}
        by_unit[module.unit] |= units - {module.unit}
    folders = Counter(str(m.path.parent) for m in found if m.path.stem != "__init__")
    lengths = [num_lines(function) for module in found for function in module.functions]
    long = [length for length in lengths if length > LONG_FUNCTION]
    named = testable(found)
    missing = untested(found, root / "tests")
    files = [module.num_lines for module in found]
    return {
        "files": len(found),
        "lines": sum(files),
        "file lines, median": statistics.median(files),
        "file lines, largest": max(files),
        "modules flat at the top": folders["optkit"],
        "fullest folders": dict(folders.most_common(5)),
        "units": len(by_unit),
        "levels of units": num_levels(by_unit),
        "imports between units": sum(map(len, by_unit.values())),
        "cycles of units": cycles(by_unit),
        "cycles of modules": cycles(by_module),
        "functions": len(lengths),
        "function lines, median": statistics.median(lengths),
        "function lines, longest": max(lengths),
        "functions over 40 lines, %": round(100 * len(long) / len(lengths), 2),
        "docstrings that open with a question word": len(question_openings(found)),
        "pronouns per 100 docstring words": round(pronouns_per_100_words(found), 2),
        "modules with a test of their stem": f"{len(named) - len(missing)} of {len(named)}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path())
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--list", choices=("question", "pronouns", "untested"))
    options = parser.parse_args()
    if options.list:
        found = modules(options.root)
        lists = {
            "question": lambda: question_openings(found),
            "pronouns": lambda: pronoun_places(found),
            "untested": lambda: untested(found, options.root / "tests"),
        }
        print("\n".join(lists[options.list]()))
        return
    figures = measure(options.root)
    print(json.dumps(figures, indent=1) if options.json else table(figures))


def table(figures: dict[str, object]) -> str:
    width = max(map(len, figures))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in figures.items())


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as head may stop early
    main()
