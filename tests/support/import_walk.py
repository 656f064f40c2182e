"""The packages that each command can import, read from the sources without running them.

The walk starts at a command's function and follows every import, also inside functions, except imports under
``TYPE_CHECKING``. A string with the name of an optkit module counts as an import of the module: the tables of passes
and of engine factories hold such strings. An import in a function with a call ``need_extra("NAME", ...)`` is behind
the extra NAME, with all modules reached only through the import. The same holds for the methods of a class with the
call in ``__init__``, and for a private function if all callers in the module make the call.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "optkit": ROOT / "optkit",
    "optkit.passes": ROOT / "passes",
    "optkit.kernels": ROOT / "kernels" / "ops",
    "optkit.recipes": ROOT / "recipes",
}
NAMED = re.compile(r"optkit(\.\w+)+")
Extras = frozenset[str]


@dataclass(frozen=True)
class Import:
    """An import: the name of the module, and the extras checked before."""

    name: str
    extras: Extras
    line: int


@functools.cache
def source_of(module: str) -> Path | None:
    """The file of a module of optkit, or None."""
    known = [name for name in FOLDERS if module == name or module.startswith(f"{name}.")]
    if not known:
        return None
    root = max(known, key=len)
    path = FOLDERS[root] / module[len(root) + 1 :].replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


@functools.cache
def imports_of(module: str) -> tuple[Import, ...]:
    """Every import of a module of optkit."""
    file = source_of(module)
    assert file is not None, module
    body = ast.parse(file.read_text()).body
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    inherited = inherited_extras(functions)
    return tuple(
        found
        for statement in body
        for found in _of_node(statement, inherited.get(getattr(statement, "name", ""), Extras()))
    )


def inherited_extras(functions: dict[str, ast.FunctionDef]) -> dict[str, Extras]:
    """name of a function of a module -> the extras checked by every caller, for private functions.

    The largest solution of "what a caller checks, or inherits", which also holds for functions in a cycle of calls.
    Public functions and functions without callers inherit none.
    """
    callers = {
        name: [one for one in functions.values() if one.name != name and _mentions(one, name)]
        for name in functions
        if name.startswith("_")
    }
    checked = {name: needed_extras(function) for name, function in functions.items()}
    inherited = dict.fromkeys(functions, Extras())
    inherited |= {name: Extras().union(*checked.values()) for name, found in callers.items() if found}
    while True:
        smaller = inherited | {
            name: frozenset.intersection(*(checked[one.name] | inherited[one.name] for one in found))
            for name, found in callers.items()
            if found
        }
        if smaller == inherited:
            return inherited
        inherited = smaller


def _mentions(function: ast.FunctionDef, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(function))


def _imports(body: list[ast.stmt], extras: Extras) -> Iterator[Import]:
    for statement in body:
        yield from _of_node(statement, extras)


def _of_node(node: ast.AST, extras: Extras) -> Iterator[Import]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        yield from _imports(node.orelse, extras)
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        extras |= needed_extras(node)
    if isinstance(node, ast.ClassDef):  # a method runs after the constructor
        constructors = (item for item in node.body if getattr(item, "name", "") == "__init__")
        extras = extras.union(*map(needed_extras, constructors))
    yield from _named(node, extras)
    for child in ast.iter_child_nodes(node):
        yield from _of_node(child, extras)


def _named(node: ast.AST, extras: Extras) -> Iterator[Import]:
    """The imports made by the statement ``node``."""
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, extras, node.lineno) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield Import(node.module, extras, node.lineno)
        yield from (Import(f"{node.module}.{alias.name}", extras, node.lineno) for alias in node.names)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        name = node.value.partition(":")[0]
        if NAMED.fullmatch(name) and source_of(name):
            yield Import(name, extras, node.lineno)


def needed_extras(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Extras:
    """The extras checked by ``function`` in the body."""
    calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
    named = (call.args[0] for call in calls if ast.unparse(call.func).endswith("need_extra"))
    return frozenset(str(name.value) for name in named if isinstance(name, ast.Constant))


def outside_packages(module: str) -> dict[tuple[str, Extras], str]:
    """(top-level package outside optkit, the extras checked before) -> a place with the import."""
    found: dict[tuple[str, Extras], str] = {}
    waiting, seen = [(module, Extras())], {(module, Extras())}
    while waiting:
        current, extras = waiting.pop()
        for item in imports_of(current):
            behind = extras | item.extras
            top = item.name.partition(".")[0]
            if top != "optkit":
                if top not in sys.stdlib_module_names:
                    found.setdefault((top, behind), f"{current}, line {item.line}")
            else:
                for name in _with_parents(item.name):
                    if (name, behind) not in seen:
                        seen.add((name, behind))
                        waiting.append((name, behind))
    return found


def _with_parents(name: str) -> Iterator[str]:
    """The modules run by importing ``name``; ``name`` may also be an attribute of a module."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        if source_of(".".join(parts[:length])):
            yield ".".join(parts[:length])
