"""The estimate of a run: it grows with the model, and what cannot fit is refused with the number and the remedy."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch

from optkit.checkpoint.safetensors_header import TensorInfo
from optkit.checkpoint.validate import CheckpointInfo
from optkit.errors import UserError
from optkit.lowering.lower import lower
from optkit.machine.target import Target
from optkit.passes.resolve import resolve_passes
from optkit.pipeline import estimate as module
from optkit.pipeline.estimate import (
    Estimate,
    all_passes,
    bytes_per_weight,
    estimate,
    refuse_what_cannot_fit,
)
from optkit.recipe.load import load_recipe, parse_recipe
from tests.support.graphs import apply, captured
from tests.support.target import TARGET

GB = 10**9
MACHINE = Target("cpu", "cpu", ("avx2",), 2, 24 * GB, 1e11, 4e11, 0.0, 0.0, 2e10, "measured")


def llama(layers: int, hidden: int, ffn: int, vocabulary: int = 128256) -> CheckpointInfo:
    """Sizes of a model with untied head and as many key heads as heads."""
    shapes = {"embed": (vocabulary, hidden), "head": (vocabulary, hidden)}
    for layer in range(layers):
        shapes |= {f"{layer}.{i}": (hidden, hidden) for i in range(4)}
        shapes |= {f"{layer}.mlp.{i}": (ffn, hidden) for i in range(3)}
    tensors = {name: TensorInfo(Path("m"), "BF16", shape) for name, shape in shapes.items()}
    return CheckpointInfo({"vocab_size": vocabulary}, tensors)


SMALL, LARGE = llama(16, 2048, 8192), llama(32, 4096, 14336)


def of(info: CheckpointInfo, recipe: str) -> Estimate:
    return estimate(info, resolve_passes(load_recipe(recipe)), MACHINE, 20480)


def test_estimate_of_bytes_follows_the_bits_of_the_recipe() -> None:
    floats, eight = (of(LARGE, name) for name in ("baseline", "ttft-cpu"))
    text = "schema_version: 1\nname: four\ntarget: cpu\npasses: {w4a8: {lm_head: true}}\n"
    four = estimate(LARGE, resolve_passes(parse_recipe(text)), MACHINE, 20480)
    assert floats.served == 4 * floats.parameters
    assert 1.0 < eight.served / eight.parameters < 1.4
    assert four.served < eight.served < floats.served


def test_int8_weights_take_the_bytes_of_the_packed_layout() -> None:
    text = "schema_version: 1\nname: eight\ntarget: cpu\npasses: {int8: {group_size: 32}}\n"
    (one,) = all_passes(resolve_passes(parse_recipe(text)))
    graph = captured("llama")
    apply(graph, "int8", group_size=32)
    model = lower(graph, TARGET)
    packed = [t for t in model.variants[-1].tensors() if t.dtype == torch.uint8]  # codes and scales
    shapes = [w.shape for w in graph.weights.values() if w.value.dtype == torch.int8]
    # A byte for each 32 output channels, in whole cache lines and whole bytes a channel, is not in the estimate.
    ends = sum(-(-64 // n) * n for n, _ in shapes)
    assert sum(t.nbytes for t in packed) == sum(map(prod, shapes)) * bytes_per_weight(one) + ends


def test_estimate_grows_with_the_model() -> None:
    small, large = of(SMALL, "ttft-cpu"), of(LARGE, "ttft-cpu")
    for name in ("seconds", "memory", "served", "disk"):
        assert getattr(small, name) < getattr(large, name)


def test_float_copies_take_four_bytes_a_weight_on_disk_and_nothing_else() -> None:
    resolved = resolve_passes(load_recipe("edge-cpu"))
    alone, both = (estimate(LARGE, resolved, MACHINE, 20480, float_copies=copies) for copies in (False, True))
    assert both == replace(alone, disk=alone.disk + 4 * alone.parameters)


def test_run_memory_stays_below_the_float_weights_of_a_large_model() -> None:
    large = of(LARGE, "ttft-cpu")
    assert large.memory < 4 * large.parameters / 2


def test_line_has_all_figures() -> None:
    line = Estimate(1_236_000_000, 1500.0, 5.21e9, 1.4e9, 9.9e9).line()
    assert line == (
        "estimate for 1.24B parameters: about 25 min, 5.2 GB of memory, 9.9 GB of disk; "
        "1.4 GB of weights when served"
    )


@pytest.mark.parametrize(
    ("change", "number", "remedy"),
    [
        ({"served": 32e9}, "32.0 GB of weights", "w4a8"),
        ({"memory": 30e9}, "30.0 GB of memory", "w4a8"),
        ({"disk": 9e18}, "GB of disk", "OPTKIT_CACHE"),
    ],
)
def test_refusal_has_the_number_and_the_remedy(
    change: dict[str, float], number: str, remedy: str, tmp_path: Path
) -> None:
    fitting = Estimate(8 * GB, 60.0, 5e9, 6e9, 1.0)
    refuse_what_cannot_fit(fitting, MACHINE, tmp_path / "new" / "artifact")
    with pytest.raises(UserError) as refused:
        refuse_what_cannot_fit(replace(fitting, **change), MACHINE, tmp_path / "new")
    assert number in refused.value.what and remedy in str(refused.value.fix)


def test_refusal_names_the_full_disk_of_the_artifact() -> None:
    needed = Estimate(8 * GB, 60.0, 5e9, 6e9, 1.0)
    with pytest.raises(UserError) as refused:
        refuse_what_cannot_fit(needed, MACHINE, Path("/proc/artifact"))  # a file system without room
    assert refused.value.where == "/proc" and "write the artifact" in str(refused.value.fix)


@pytest.mark.parametrize("change", [{"served": 32e9}, {"memory": 30e9}])
def test_refusal_does_not_recommend_what_the_recipe_has(change: dict[str, float], tmp_path: Path) -> None:
    found = replace(Estimate(8 * GB, 60.0, 5e9, 6e9, 1.0), **change)
    for options, known in (("{}", "served" in change), ("{lm_head: true}", False)):
        text = f"schema_version: 1\nname: four\ntarget: cpu\npasses: {{w4a8: {options}}}\n"
        resolved = resolve_passes(parse_recipe(text))
        with pytest.raises(UserError) as refused:
            refuse_what_cannot_fit(found, MACHINE, tmp_path, resolved)
        assert ("w4a8" in str(refused.value.fix)) == known


def test_optimize_refuses_before_anything_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optkit.pipeline.driver import Pipeline, optimize
    from tests.support.model_directory import save_model

    monkeypatch.setattr(module, "PROCESS_BYTES", 1e15)
    monkeypatch.setattr(Pipeline, "run", lambda self: pytest.fail("the run began"))
    lines: list[str] = []

    def progress(text: str, /, *, part: tuple[int, int] | None = None) -> None:
        lines.append(text)

    with pytest.raises(UserError, match="of memory, this machine has"):
        optimize(str(save_model(tmp_path / "m")), "ttft-cpu", tmp_path / "out", progress=progress)
    assert lines[-1].startswith("estimate for 0.00B parameters") and not (tmp_path / "out").exists()


def test_a_model_that_is_loaded_whole_takes_its_float_weights_in_memory() -> None:
    resolved = resolve_passes(load_recipe("ttft-cpu"))
    streamed, whole = (estimate(LARGE, resolved, MACHINE, 20480, loaded_whole=kind) for kind in (False, True))
    assert whole.memory > 4 * whole.parameters > streamed.memory
    assert replace(whole, memory=streamed.memory) == streamed
