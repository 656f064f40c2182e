"""Compiled layers in the pipeline: made once, rolled back where none is faster, and copied into the artifact."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optkit.graph.ir import Graph
from optkit.pipeline import compile_hook
from optkit.pipeline.aot_compile import Built
from optkit.recipe.load import parse_recipe
from tests.support.sample_artifact import int8_record, small_graph
from tests.support.target import TARGET

RECIPE = parse_recipe("schema_version: 1\nname: small\npasses: {}\nruntime: {compute_dtype: float16}\n")
ROWS = [{"tokens": "2", "kept": False}, {"tokens": "8", "kept": False}]


def planned() -> Graph:
    graph = small_graph()
    graph.annotations["compile"] = {"regions": []}
    return graph


def no_progress(text: str, **part: Any) -> None:
    pass


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of the compiler and of lowering, with the given graph."""
    made: list[Any] = []

    def recorded(name: str, result: Any = None) -> None:
        def call(graph: Graph, *args: Any, **options: Any) -> Any:
            made.append((name, graph, options))
            return result

        monkeypatch.setattr(compile_hook, name, call)

    recorded("rebuild")
    recorded("cached_tier")
    monkeypatch.setattr(
        compile_hook.hook,
        "lower_with_code",
        lambda graph, target, **o: made.append(("lower", graph, o)) or "model",
    )
    return made


@pytest.mark.parametrize("tier", [None, SimpleNamespace()])
def test_build_code_rolls_the_pass_back_where_no_variant_is_faster(
    tier: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_hook, "prebuild", lambda *args: Built(tier, ROWS))
    record = int8_record()
    assert compile_hook.build_code(planned(), record, RECIPE, TARGET, no_progress) is (tier is not None)
    assert record.stats["compiled"] == ROWS
    rolled_back = ("rolled back", "compiled: 0 of 2 variants kept, none is faster")
    assert (record.decision, record.reason) == (("kept", "prefill 2.00x") if tier else rolled_back)


def test_graph_without_a_plan_is_compiled_by_nobody(calls: list[Any], tmp_path: Path) -> None:
    graph, record = small_graph(), int8_record()
    assert compile_hook.build_code(graph, record, RECIPE, TARGET, no_progress)
    compile_hook.ensure_code(graph, RECIPE, TARGET, no_progress)
    compile_hook.write_code(graph, TARGET, tmp_path / "native")
    assert record == int8_record() and not (tmp_path / "native").exists()
    assert [name for name, *_ in calls] == ["cached_tier"]


def test_code_is_made_again_from_a_copy_where_it_is_no_longer_cached(calls: list[Any]) -> None:
    graph = planned()
    assert compile_hook.lower_with_code(graph, RECIPE, TARGET, no_progress) == "model"
    (_, seen, _), (rebuilt, copy, _), (lowered, own, options) = calls
    assert (rebuilt, lowered) == ("rebuild", "lower")
    assert seen is graph and copy is not graph and own is graph
    assert options == {"dtype": torch.float16}


def test_cached_code_is_copied_into_the_artifact_and_not_made_again(
    calls: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tier").mkdir()
    for name in ("code.json", "tail.so"):
        (tmp_path / "tier" / name).write_bytes(name.encode())
    tier = SimpleNamespace(directory=tmp_path / "tier", files=lambda: [("tail.so", "sha256")])
    monkeypatch.setattr(compile_hook, "cached_tier", lambda graph, target: tier)
    compile_hook.ensure_code(planned(), RECIPE, TARGET, no_progress)
    compile_hook.write_code(planned(), TARGET, tmp_path / "native")
    assert not calls
    assert {p.name: p.read_bytes() for p in (tmp_path / "native").iterdir()} == {
        "code.json": b"code.json",
        "tail.so": b"tail.so",
    }
