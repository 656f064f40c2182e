"""What must stay true of the repository: its layout, cheap imports, and no code that runs data."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import structure

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(path for folder in ("optkit", "passes", "kernels") for path in (ROOT / folder).rglob("*.py"))
BANNED_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
BANNED_CALLS = {
    "eval",
    "exec",
    "torch.load",
    "torch.export.load",
    "torch.package.PackageImporter",
    "torch.jit.load",
    "numpy.load",
    "np.load",
    "yaml.load",
    "yaml.load_all",
    "yaml.full_load",
    "yaml.unsafe_load",
    "os.system",
}
INPUT_PACKAGES = ("artifact", "checkpoint", "recipe", "serve")  # where data from outside is read


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call with its dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def imports(tree: ast.AST) -> Iterator[str]:
    """Every imported module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def violations(tree: ast.AST) -> list[str]:
    """Banned imports and calls in ``tree``."""
    found = [f"import {name}" for name in imports(tree) if name.split(".")[0] in BANNED_MODULES]
    for name, node in calls(tree):
        if name in BANNED_CALLS:
            found.append(f"line {node.lineno}: {name}")
        for keyword in node.keywords:
            if keyword.arg == "trust_remote_code" and getattr(keyword.value, "value", None) is not False:
                found.append(f"line {node.lineno}: trust_remote_code")
            if keyword.arg == "weights_only" and getattr(keyword.value, "value", None) is not True:
                found.append(f"line {node.lineno}: weights_only")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_file_can_run_data_as_code(path: Path) -> None:
    assert violations(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from marshal import loads",
        "torch.load('x')",
        "eval('1')",
        "yaml.load(text, Loader=L)",
        "f(trust_remote_code=True)",
        "f(trust_remote_code=flag)",
    ],
)
def test_the_scan_finds_what_it_looks_for(code: str) -> None:
    assert violations(ast.parse(code))


def test_the_scan_leaves_a_model_in_eval_mode_alone() -> None:
    assert violations(ast.parse("model.eval(); yaml.safe_load(t); f(trust_remote_code=False)")) == []


def test_input_is_never_validated_with_assert() -> None:
    modules = [path for name in INPUT_PACKAGES for path in (ROOT / "optkit" / name).rglob("*.py")]
    assert len(modules) >= 40
    for path in modules:
        tree = ast.parse(path.read_text())
        lines = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
        assert lines == [], f"{path} uses assert on lines {lines}"


# The order of the data flow. A package imports only packages that stand before it.
PACKAGES = (
    *(
        "version",
        "errors",
        "cancellation",
        "callable_package",
        "extras",
        "json_names",
        "plugins",
        "untrusted_json",
    ),
    *(
        "machine",
        "pages",
        "recipes",
        "recipe",
        "text",
        "kernels",
        "graph",
        "lowering",
        "parallel",
        "checkpoint",
        "calibration",
        "artifact",
    ),
    *(
        "profiling",
        "runtime",
        "capture",
        "evaluation",
        "passes",
        "pipeline",
        "serve",
        "bench",
        "simulation",
        "plan",
        "tune",
    ),
    *("report", "fleet", "api", "cli"),
)


def test_a_package_imports_only_what_stands_before_it() -> None:
    modules = structure.modules(ROOT)
    names = {module.name for module in modules}
    assert {module.unit for module in modules} <= {"optkit", *PACKAGES}
    backward = [
        f"{module.name} imports {target}"
        for module in modules
        for target in structure.imports(module, names) - {"optkit"}
        if module.name != "optkit" and PACKAGES.index(target.split(".")[1]) > PACKAGES.index(module.unit)
    ]
    assert backward == []


def test_few_modules_lie_flat_at_the_top() -> None:
    flat = [path for path in (ROOT / "optkit").glob("*.py") if path.stem != "__init__"]
    assert len(flat) <= 8


def test_kernels_is_no_package_of_its_own() -> None:
    """With an ``__init__.py`` it would shadow the Hugging Face package ``kernels`` from the repository root."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_importing_optkit_is_cheap() -> None:
    code = "import sys, optkit; sys.exit(str({'torch', 'transformers', 'numpy', 'pydantic'} & set(sys.modules) or ''))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr.strip() == ""


def test_importing_the_recipe_and_its_neighbours_needs_no_torch() -> None:
    modules = "optkit.recipe.load, optkit.checkpoint.validate, optkit.checkpoint.locate, optkit.cli.main"
    code = f"import sys, {modules}; sys.exit('torch' if 'torch' in sys.modules else 0)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def package_folders() -> dict[str, Path]:
    """Package name to folder, as pyproject.toml maps them."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    mapping = tools["package-dir"]
    folders = {}
    for package in tools["packages"]:
        root = max((known for known in mapping if f"{package}.".startswith(f"{known}.")), key=len)
        folders[package] = ROOT / mapping[root] / package[len(root) :].strip(".").replace(".", "/")
    return folders


def test_every_listed_package_is_there() -> None:
    missing = [
        package for package, folder in package_folders().items() if not (folder / "__init__.py").is_file()
    ]
    assert missing == []


def test_every_package_that_is_there_is_listed() -> None:
    roots = [ROOT / "optkit", ROOT / "passes", ROOT / "kernels" / "ops", ROOT / "recipes"]
    present = {init.parent for root in roots for init in root.rglob("__init__.py")}
    assert present == set(package_folders().values())


def test_every_dependency_says_what_it_is_for() -> None:
    """docs/decisions/0005-dependencies.md names each package of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "docs" / "decisions" / "0005-dependencies.md").read_text().lower()
    extras = itertools.chain.from_iterable(project["optional-dependencies"].values())
    for requirement in [*project["dependencies"], *extras]:
        name = re.split(r"[^\w.-]", requirement)[0].lower()
        assert name == "optkit" or re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text), name
