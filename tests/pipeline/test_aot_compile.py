"""Prebuild: the workload's steps, and which variants are kept by their times. Nothing is compiled here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from optkit.errors import UserError
from optkit.graph.ir import Graph
from optkit.graph.shapes import Point
from optkit.lowering.compiled.region import Variant
from optkit.pipeline import aot_compile as module
from optkit.pipeline.aot_compile import Built, step_points
from optkit.pipeline.report import compiled_table
from optkit.recipe.load import parse_recipe
from optkit.recipe.schema import Recipe
from tests.passes.test_compile import CONTEXT, TARGET, captured, checked

RECIPE = """
schema_version: 1
name: steps
workload: {prompt_tokens: [24, 40], histogram: [[24, 3], [40, 1]], output_tokens: 4, batch: 2}
runtime: {block_size: 8, max_num_batched_tokens: 32, kv_cache_bytes: 1MiB}
passes: {}
"""


def recipe(*overrides: str) -> Recipe:
    return parse_recipe(RECIPE, overrides=overrides)


def test_prompts_become_chunks_and_decodes():
    assert step_points(recipe()) == {
        24: (3.0, Point(24, 1, 24)),
        32: (1.0, Point(32, 1, 32)),
        8: (1.0, Point(8, 1, 8)),
        2: (4 * 4 / 2, Point(2, 2, 41)),
    }


def test_without_a_histogram_each_measured_length_counts_once():
    steps = step_points(
        recipe("workload.histogram=null", "workload.prompt_tokens=[8, 64]", "workload.batch=1")
    )
    assert {size: weight for size, (weight, _) in steps.items()} == {8: 1.0, 32: 2.0, 1: 8.0}


@pytest.mark.parametrize(
    "bad", ["[]", "[[24, 0]]", "[[0, 1]]", "[[24, 1], [24, 2]]", "[24]", "{24: 1}", "[[24, -1]]"]
)
def test_impossible_histograms_are_refused(bad: str):
    with pytest.raises(UserError):
        recipe(f"workload.histogram={bad}")


def test_a_histogram_round_trips():
    assert parse_recipe(recipe().to_yaml()) == recipe()


@pytest.fixture
def timed(monkeypatch):
    """``timed(plan options, seconds of a variant or of the uncompiled model by step size)``: what is built."""

    def run(seconds: Mapping[tuple[Any, int], float], **options: Any) -> tuple[Built, Graph]:
        graph = captured("gpt2")
        optimization, plan = checked(graph, **options)
        optimization.apply(graph, plan, CONTEXT)

        def make(candidate, source, directory):
            candidate.variant = Variant(candidate.first, candidate.last, lambda inputs: [])
            stem = module.file_stem(candidate.last)
            (directory / f"{stem}.so").write_bytes(b"code")

        def step(model, point, recipe):
            return (model.special and (model.special.region.variants[0].last or "tail"), point.tokens)

        monkeypatch.setattr(module, "make", make)
        monkeypatch.setattr(module, "step_function", step)
        monkeypatch.setattr(
            module, "interleaved", lambda steps, rounds=3: [[seconds[s]] * rounds for s in steps]
        )
        return module.prebuild(graph, recipe(), TARGET), graph

    return run


PLAIN = {(None, 2): 1.0, (None, 8): 2.0, (None, 24): 6.0, (None, 32): 8.0}


def test_only_what_is_faster_is_kept(timed, tmp_path, monkeypatch):
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "optkit"))
    own = {(2, 2): 0.5, (24, 8): 5.8, (24, 24): 5.8, (32, 32): 7.9}  # 7.9 for 8.0 is noise
    built, graph = timed(PLAIN | own, max_buckets=3, dynamic_tail=False)
    assert [(row["tokens"], row["kept"]) for row in built.rows] == [
        ("2", True),
        ("8 to 24", False),
        ("32", False),
    ]
    assert {row["reason"] for row in built.rows[1:]} == {"not faster than the uncompiled path"}
    assert built.rows[1]["compiled_seconds"] == pytest.approx(5.8)
    assert built.rows[1]["uncompiled_seconds"] == (1 * 2.0 + 3 * 6.0) / 4
    assert (
        graph.annotations["compile"]["buckets"] == [[2, 2]]
        and not graph.annotations["compile"]["dynamic_tail"]
    )
    assert built.tier is not None and built.tier.is_ours
    (entry,) = built.tier.record.variants
    assert (entry.first, entry.last, entry.seconds, entry.uncompiled_seconds) == (2, 2, 0.5, 1.0)
    table = compiled_table(built.rows)
    assert next(iter(table.columns[3].cells)).plain == "compiled" and table.row_count == 3


def test_a_bucket_has_to_beat_the_tail(timed, tmp_path, monkeypatch):
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "optkit"))
    tail = {("tail", 2): 0.4, ("tail", 8): 1.0, ("tail", 24): 3.0, ("tail", 32): 4.0}
    own = {(2, 2): 0.3, (8, 8): 1.0, (24, 24): 3.5}
    built, graph = timed(PLAIN | tail | own, buckets=[2, 8, 24])
    kept = {row["tokens"]: row["reason"] for row in built.rows}
    assert kept == {
        "2": "",
        "8": "the code for any number of tokens is as fast",
        "24": "the code for any number of tokens is as fast",
        "any number": "",
    }
    assert (
        graph.annotations["compile"]["buckets"] == [[2, 2]] and graph.annotations["compile"]["dynamic_tail"]
    )


def test_one_lost_round_is_enough_to_lose():
    assert module.wins([1.0, 1.0, 1.0], [1.1, 1.1, 1.1])
    assert not module.wins([1.0, 1.0, 1.0], [9.0, 9.0, 1.01])


def test_nothing_faster_removes_the_plan(timed):
    built, graph = timed(PLAIN | {(n, n): 100.0 for n in (2, 8, 24, 32)}, max_buckets=4, dynamic_tail=False)
    assert built.tier is None and "compile" not in graph.annotations
    assert not any(row["kept"] for row in built.rows)


@pytest.mark.parametrize(
    "damage", [{"buckets": 7}, {"buckets": [[3, 2]]}, {"buckets": [[1]]}, {"dynamic_tail": ...}]
)
def test_a_damaged_plan_is_refused(damage: dict[str, Any]):
    graph = captured("gpt2")
    optimization, plan = checked(graph, buckets=[2])
    optimization.apply(graph, plan, CONTEXT)
    graph.annotations["compile"] |= damage
    if damage == {"dynamic_tail": ...}:
        del graph.annotations["compile"]["dynamic_tail"]
    with pytest.raises(UserError, match="compile plan is damaged"):
        module.prebuild(graph, recipe(), TARGET)
