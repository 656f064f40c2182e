"""Each command imports only packages that are declared, and says which extra is missing before it needs one."""

from __future__ import annotations

import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from optkit import extras
from optkit.cli.main import COMMANDS, run
from optkit.errors import UserError
from tests.support.import_walk import imports_of, outside_packages

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Not declared: it comes with the builds of torch that can use it, and kernels/ops/triton looks for it first.
WITH_TORCH = {"triton"}


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


CORE = names(PROJECT["dependencies"])
EXTRAS = {extra: names(found) for extra, found in PROJECT["optional-dependencies"].items()}


def undeclared(module: str) -> list[str]:
    """Packages that ``module`` can reach and that neither the core nor a checked extra declares."""
    found, distributions = [], packages_distributions()
    for (package, behind), place in outside_packages(module).items():
        declared = CORE.union(*(EXTRAS[extra] for extra in behind))
        options = {canonicalize_name(name) for name in distributions.get(package, [package])}
        if package not in WITH_TORCH and not options & declared:
            found.append(f"{package} ({place}), behind {sorted(behind) or 'no extra'}")
    return found


@pytest.mark.parametrize(
    "module",
    [
        *(place.partition(":")[0] for place in COMMANDS.values()),
        *("optkit.api.llm", "optkit.api.recipe"),
    ],
)
def test_commands_reach_only_packages_that_are_declared(module: str) -> None:
    assert undeclared(module) == []


def test_the_walk_follows_functions_tables_and_child_processes() -> None:
    reached = {package for package, _ in outside_packages("optkit.cli.optimize")}
    assert {"torch", "transformers", "msgspec", "pydantic", "jinja2", "tokenizers"} <= reached
    served = {package for package, behind in outside_packages("optkit.cli.serve") if "serve" in behind}
    assert {"fastapi", "uvicorn", "prometheus_client"} <= served
    assert any(found.name == "optkit.passes.int8" for found in imports_of("optkit.passes"))


# -- where an extra is missing -----------------------------------------------------------------------------


@pytest.fixture
def only_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """No distribution of an extra is installed."""
    version = extras.installed_version
    monkeypatch.setattr(extras, "installed_version", lambda name: version(name) if name in CORE else None)


@pytest.mark.usefixtures("only_core")
@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (["serve", "artifact"], "serve"),
        (["bench", "artifact"], "serve"),
        (["eval", "http://127.0.0.1:9"], "serve"),
        (["optimize", "model.gguf", "-r", "baseline"], "formats"),
    ],
)
def test_a_command_names_the_pip_command_in_one_line_without_its_extra(
    command: list[str],
    extra: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(64))
    assert run(command) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert f"pip install 'optkit[{extra}]'" in line


def test_required_reads_what_pyproject_declares() -> None:
    assert {canonicalize_name(found.name) for found in extras.required()} == CORE
    for extra in extras.EXTRAS:
        assert {canonicalize_name(found.name) for found in extras.required(extra)} == EXTRAS[extra]


def test_requirements_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request with a grammar asks for them, from any thread."""
    first = extras.required("structured")
    monkeypatch.setattr("packaging.requirements.Requirement", None)
    assert first
    assert extras.required("structured") == first


def test_required_is_empty_where_optkit_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> list[str]:
        raise extras.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(extras.metadata, "requires", absent)
    assert extras.required("serve") == []
    extras.need_extra("serve", "optkit serve")


def test_an_import_that_nobody_expected_names_the_package() -> None:
    found = extras.missing_package(ModuleNotFoundError("No module named 'fast.api'", name="fast.api"))
    assert isinstance(found, UserError) and "'fast'" in found.what and found.fix == "pip install fast"
    assert extras.missing_package(ModuleNotFoundError("x", name="optkit.nowhere")) is None
