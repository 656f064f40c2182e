"""The files of an op, as CONTRIBUTING.md lists them: at most eight, and exactly those that name the example."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("kernels", "optkit/graph", "optkit/lowering")
STEP = re.compile(r"^\d+\. `([\w./]+)`", re.MULTILINE)
MAX_FILES = 8
# The reference hands the spec on, the op on the weights of experts names the linear op of which it is a variant, and a
# chain of ops that are one call names the ops.
BESIDE = {
    "kernels/ops/reference.py",
    "kernels/ops/reference_experts.py",
    "optkit/graph/ops/experts.py",
    "kernels/ops/cpu/mlp.py",
}


def walk() -> tuple[str, list[str]]:
    """The example op and the files of the section "Add an op"."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Add an op\n")[2].partition("\n## ")[0]
    example = re.search(r"Those of `(\w+)`", section)
    assert example is not None
    return example[1], STEP.findall(section)


def mentions(op: str, path: Path) -> bool:
    """True where the file names the op, its native function or its emitter."""
    return re.search(rf"\b(?:optkit_|emit_)?{op}\b", path.read_text()) is not None


def test_walk_has_at_most_eight_files_and_all_name_the_op() -> None:
    op, files = walk()
    assert len(files) <= MAX_FILES
    assert [file for file in files if not mentions(op, ROOT / file)] == []


def test_no_other_source_file_names_the_op() -> None:
    op, files = walk()
    sources = [
        path
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cpp", ".h")
    ]
    found = {str(path.relative_to(ROOT)) for path in sources if mentions(op, path)}
    assert found - BESIDE == {file for file in files if not file.startswith("tests/")}


def test_readme_of_kernels_names_every_step() -> None:
    text = (ROOT / "kernels" / "README.md").read_text()
    for name in (
        "signatures.h",
        "ops/cpu/",
        "ops/triton/",
        "EMITTERS",
        "KERNELS",
        "tests/kernels/triton/",
        "optkit/graph/ops/",
    ):
        assert name in text, name
