"""Keys of finished steps follow every source file that can decide a step, of optkit and of plug-in passes."""

from __future__ import annotations

import ast
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from optkit.pipeline import sources
from tools import structure

FOLDERS = {"optkit": "", "optkit.passes": "passes", "optkit.kernels": "kernels"}
DATA = "optkit.recipes"  # YAML files, whose content is in the keys of steps


def file_of(module: str) -> Path | None:
    """The source file of a module of optkit; None for a name that is no module."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # its parent is no package
        return None
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def names(module: str, file: Path) -> Iterator[str]:
    """Everything in ``file`` that may name a module at run time: imports, also inside functions, and rows of tables."""
    for node in structure.run_time_nodes(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "sources import by full names"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and module != "optkit.pipeline.sources"
        ):
            yield node.value.partition(":")[0]


def closure(module: str) -> dict[str, Path]:
    """The modules of optkit that ``module`` can import, and their files."""
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if (
            name in (*found, DATA)
            or not name.startswith("optkit")
            or not name.replace(".", "").isidentifier()
        ):
            continue
        file = file_of(name)
        if file is not None:
            found[name] = file
            waiting += [name.rpartition(".")[0], *names(name, file)]
    return found


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of all sources, laid out as they are installed."""
    root = tmp_path_factory.mktemp("sources") / "optkit"
    for package, folder in FOLDERS.items():
        (place,) = sources.locations(package)
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(place, root / folder, dirs_exist_ok=True, ignore=ignored)
    return root


@pytest.fixture
def digest(copied: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """``compiler_digest`` of the copy, computed anew at each call."""

    def locations(package: str) -> tuple[Path, ...]:
        return (copied.joinpath(*package.split(".")[1:]),)

    monkeypatch.setattr(sources, "locations", locations)
    yield sources.compiler_digest.__wrapped__


def test_compiler_digest_changes_with_every_module_that_the_pipeline_can_import(
    copied: Path, digest: object
) -> None:
    """Every module is hashed by itself; a digest of all files, which takes 50 ms, is made for some."""
    modules = closure("optkit.pipeline.driver")
    decisive = {
        f"optkit.{name}"
        for name in (
            *(
                "checkpoint.source",
                "calibration.samples",
                "evaluation.quality",
                "evaluation.speed",
                "passes.gptq",
            ),
            *("pipeline.decision", "pipeline.fallback", "recipe.schema", "kernels.cpu.int8", "kernels.cpu"),
        )
    }
    assert decisive <= set(modules)
    assert len(modules) > 100
    before, files = digest(), sources.compiler_files()  # type: ignore[operator]
    for module, file in modules.items():
        is_package = file.name == "__init__.py"
        path = copied.joinpath(*module.split(".")[1:])
        edited = path / "__init__.py" if is_package else path.with_suffix(".py")
        content, alone = edited.read_bytes(), {edited: files[edited]}
        own = sources.digest(alone)
        edited.write_bytes(content + b"# edited\n")
        assert sources.digest(alone) != own, module
        if module in decisive:
            assert digest() != before, module  # type: ignore[operator]
        edited.write_bytes(content)
    assert digest() == before  # type: ignore[operator]


def test_compiler_digest_changes_with_texts_tables_and_native_code(copied: Path, digest: object) -> None:
    before = digest()  # type: ignore[operator]
    for name in ("text/corpora/evaluation.txt", "kernels/cpu/int8.cpp", "kernels/cpu/simd.h"):
        content = (copied / name).read_bytes()
        (copied / name).write_bytes(content + b"\n")
        assert digest() != before, name  # type: ignore[operator]
        (copied / name).write_bytes(content)
    library = copied / "kernels" / "cpu" / "_native.so"
    library.write_bytes(b"built with other flags")
    assert digest() != before  # type: ignore[operator]
    library.unlink()


def test_modules_left_out_of_the_digest_are_none_that_the_pipeline_can_import() -> None:
    for module in closure("optkit.pipeline.driver"):
        assert not module.startswith(tuple(f"{package}." for package in sources.LEFT_OUT)), module


def test_plugin_digest_changes_with_any_file_of_the_package_and_of_its_base_classes_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("theirs", "ours"):
        (tmp_path / f"digest_{package}" / "tables").mkdir(parents=True)
        (tmp_path / f"digest_{package}" / "__init__.py").write_text("")
        (tmp_path / f"digest_{package}" / "tables" / "scales.csv").write_text("1\n")
    (tmp_path / "digest_theirs" / "base.py").write_text("class Base: pass\n")
    text = "from digest_theirs.base import Base\nclass Own(Base): pass\n"
    (tmp_path / "digest_ours" / "own.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("digest_ours.own").Own
    seen = set()
    for number, file in enumerate(sorted(path for path in tmp_path.rglob("*") if path.is_file())):
        if "__pycache__" in file.parts:
            continue
        file.write_text(file.read_text() + f"# {number}\n")
        sources.package_digest.cache_clear()
        seen.add(sources.plugin_digest(own))
    assert len(seen) == 6 and None not in seen
    assert sources.plugin_digest(object) is None
