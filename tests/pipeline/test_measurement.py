"""The evidence: sides of a measurement, and bytes of weights."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from optkit.artifact.open import Artifact
from optkit.checkpoint.safetensors_writer import Spill
from optkit.lowering.lower import Executable, lower
from optkit.machine.target import DATASHEETS
from optkit.passes.base import Plan, no_progress
from optkit.pipeline import measurement
from optkit.pipeline.measurement import Measurement
from optkit.pipeline.records import PassRecord
from tests.support.graphs import apply, captured
from tests.support.small_runs import recipe, run
from tests.support.target import TARGET

pytestmark = pytest.mark.usefixtures("quick")


def test_weights_on_a_gpu_are_counted_as_they_lie_there(source: Path) -> None:
    graph = captured("llama")
    for target, least, most in ((TARGET, 1.0, 1.0), (DATASHEETS["cuda-h100"], 0.45, 0.55)):
        measured = Measurement(source, recipe("passes: {}"), target, no_progress, graph)
        model = lower(graph, target, device="cpu")
        assert least <= measured.weight_bytes(graph, model) / graph.num_bytes() <= most


def test_speed_is_measured_against_pytorchs_attention(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model before any pass runs what a user has today, never the loop of the specification."""
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    measured: list[tuple[str, str]] = []
    measure_pair = measurement.measure_pair

    def measuring(before: Executable, after: Executable, *rest: Any) -> Any:
        found = [
            {kernel for name, kernel in model.kernels.items() if name.startswith("attention")}
            for model in (before, after)
        ]
        measured.append(tuple("+".join(sorted(kinds)) for kinds in found))  # type: ignore[arg-type]
        return measure_pair(before, after, *rest)

    monkeypatch.setattr(measurement, "measure_pair", measuring)
    run(source, tmp_path / "out", "passes: {fuse_qkv: {keep: always}, flash_attention: {}}")
    assert measured == [("sdpa", "sdpa"), ("sdpa", "native"), ("sdpa", "native")]
    run(source, tmp_path / "baseline", "passes: {}")
    attention = [
        k
        for name, k in Artifact.open(tmp_path / "baseline").executable().kernels.items()
        if "attention" in name
    ]
    assert set(attention) == {"sdpa"}


def test_pages_of_quantized_weights_are_given_back_while_a_large_model_is_packed(source: Path) -> None:
    graph = captured("llama")
    released: list[int] = []
    measured = Measurement(source, recipe("passes: {}"), TARGET, no_progress, graph, release=released.append)
    apply(graph, "w4a8")
    codes = sum(weight.value.nbytes for weight in graph.weights.values() if weight.value.dtype == torch.int32)
    measured.lower(graph)
    assert 0 < codes <= sum(released) <= graph.num_bytes()


@pytest.mark.parametrize("in_parts", [False, True])
def test_weights_of_earlier_measurements_of_a_large_model_are_freed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_parts: bool
) -> None:
    """Modules of torch.fx are cycles: without a collection their weights stay while the next model is measured."""
    graph = captured("llama", num_hidden_layers=4)
    alive: list[weakref.ref[Executable]] = []
    spill = Spill(tmp_path, least=512)
    measured = Measurement(source, recipe("passes: {}"), TARGET, no_progress, graph, spill)
    lower_with_code, measure_short = measurement.lower_with_code, Measurement.measure_short

    def lowering(*args: Any, **options: Any) -> Executable:
        model = lower_with_code(*args, **options)
        alive.append(weakref.ref(model))
        return model

    def measuring(*args: Any) -> Any:
        times = measure_short(*args)
        assert not any(reference() for reference in alive)
        return times

    monkeypatch.setattr(measurement, "lower_with_code", lowering)
    monkeypatch.setattr(Measurement, "measure_short", measuring)
    monkeypatch.setattr(Measurement, "fits", lambda *_: not in_parts)
    gc.disable()
    try:
        for _ in range(2):
            record = PassRecord.planned("x", {}, Plan())
            model = measured.measure_costs(record, graph, graph.clone())
            assert [reference() for reference in alive if reference() is not None] == [model]
            del model
    finally:
        gc.enable()
    assert len(alive) == (2 if in_parts else 4)
