"""Compilation around the compiler: its cache, its inputs, its failures, and the files that remain.

``tests/artifact/test_compiled_artifact.py`` runs the compiler.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from optkit.lowering.compiled import aot
from optkit.lowering.compiled.aot import CompileError, compile_region, example, load, private_cache
from optkit.lowering.compiled.region import Argument
from optkit.machine.paths import cache_dir

CPU = torch.device("cpu")
ROWS = Argument(torch.float32, CPU, (0, 8), (1, 0), (False, False))  # [T, 8]
BLOCKS = Argument(torch.int32, CPU, (3, 5), (0, 0), (False, True))  # [3, any]
VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "optkit"))


def module() -> fx.GraphModule:
    graph = fx.Graph()
    graph.output((graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),)),))
    return fx.GraphModule(torch.nn.Module(), graph)


def written_by(compiler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor, "aot_compile", compiler)


def compiled(module: Any, examples: Any, *, options: dict[str, Any]) -> str:
    """A compiler without code: a library and the names of its operators."""
    library = Path(options["aot_inductor.output_path"]) / "wrapper.so"
    library.write_bytes(b"code")
    library.with_suffix(".json").write_text("{}")
    return str(library)


def test_files_of_the_compiler_go_to_the_destination_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written_by(compiled, monkeypatch)
    compile_region(module(), [ROWS], 4, tmp_path / "tokens-4")
    assert (tmp_path / "tokens-4.so").read_bytes() == b"code"
    assert (tmp_path / "tokens-4.json").read_text() == "{}"
    assert not list(cache_dir("inductor").glob("aot-*"))


def test_failure_of_the_compiler_is_its_first_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any, **options: Any) -> str:
        raise RuntimeError("\ng++: error\nmany more lines")

    written_by(failing, monkeypatch)
    with pytest.raises(CompileError, match=r"^RuntimeError: g\+\+: error$"):
        compile_region(module(), [ROWS], None, tmp_path / "tail")
    assert not list(tmp_path.glob("tail*")) and not list(cache_dir("inductor").glob("aot-*"))


def test_code_with_a_condition_over_a_size_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def conditional(module: Any, examples: Any, *, options: dict[str, Any]) -> str:
        bool(examples[0].shape[0] > 100)
        return compiled(module, examples, options=options)

    written_by(conditional, monkeypatch)
    compile_region(module(), [ROWS], 200, tmp_path / "tokens-200")  # the size is known
    with pytest.raises(CompileError, match=r"the code would rely on sizes: .*100"):
        compile_region(module(), [ROWS], None, tmp_path / "tail")


@pytest.mark.parametrize("before", [None, "/elsewhere"])
def test_cache_of_the_compiler_is_private_while_it_runs(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if before:
        monkeypatch.setenv(VARIABLE, before)
    with pytest.raises(RuntimeError), private_cache():
        assert os.environ[VARIABLE] == str(cache_dir("inductor"))
        raise RuntimeError
    assert os.environ.get(VARIABLE) == before


def test_inputs_have_a_symbol_for_each_size_that_varies_and_one_for_the_tokens() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    first, second = (example(mode, ROWS, i, None) for i in (0, 1))
    blocks = example(mode, BLOCKS, 2, None)
    assert isinstance(first.shape[0], torch.SymInt) and str(first.shape[0]) == str(second.shape[0])
    assert (first.shape[1], blocks.shape[0]) == (8, 3) and isinstance(blocks.shape[1], torch.SymInt)
    assert str(blocks.shape[1]) != str(first.shape[0])
    assert example(mode, ROWS, 3, 4).shape == (4, 8)
    fixed = Argument(torch.float32, CPU, (2, 2), (0, 0), (False, False), torch.ones(2, 2))
    assert example(mode, fixed, 4, None).shape == (2, 2)


def test_file_that_is_no_library_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "tail.so").write_bytes(b"no code")
    with pytest.raises(RuntimeError):
        load(tmp_path / "tail.so", "cpu")


def test_warnings_of_the_compiler_are_hidden() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with aot.quiet():
            warnings.warn("deprecated", DeprecationWarning, stacklevel=1)
        warnings.warn("own", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in seen] == ["own"]
