"""Capture of large checkpoints, on small ones with the limits lowered: same graph, logits and refusals."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from optkit.capture import capture_directory, export, streamed
from optkit.checkpoint import tensors
from optkit.checkpoint.source import open_source
from optkit.errors import UnsupportedModel
from optkit.graph.ir import Graph
from optkit.graph.stored import StoredTensor
from optkit.kernels import reference
from tests.support.architectures import tiny_model
from tests.support.composite import composite_model
from tests.support.graphs import dense
from tests.support.model_directory import VOCABULARY, save_model
from tests.support.small_runs import IDS, transformers_logits


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "MAX_LOADED_BYTES", 0)
    for module in (streamed, tensors):
        monkeypatch.setattr(module, "STORED_BYTES", 512)


def on_disk(graph: Graph) -> list[str]:
    return [name for name, weight in graph.weights.items() if isinstance(weight.stored, StoredTensor)]


def with_file_in_bfloat16(directory: Path) -> Path:
    file = directory / "model.safetensors"
    values = {name: value.to(torch.bfloat16) for name, value in load_file(file).items()}
    save_file(values, file, metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_capture_streamed_has_the_logits_of_transformers(architecture: str, tmp_path: Path) -> None:
    tiny_model(architecture, vocab_size=VOCABULARY).save_pretrained(tmp_path)
    graph = capture_directory(tmp_path)
    assert len(on_disk(graph)) >= 10
    torch.testing.assert_close(dense(graph, IDS), transformers_logits(tmp_path, IDS), atol=1e-4, rtol=1e-4)


def test_capture_streamed_of_bfloat16_equals_that_of_the_same_weights_in_float32(tmp_path: Path) -> None:
    narrow = with_file_in_bfloat16(save_model(tmp_path / "narrow"))
    wide = tmp_path / "wide"
    save_model(wide)
    values = {name: v.float() for name, v in load_file(narrow / "model.safetensors").items()}
    save_file(values, wide / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(dense(capture_directory(narrow), IDS), dense(capture_directory(wide), IDS))


def test_capture_streamed_refuses_a_graph_with_other_arithmetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    canonicalize = export.canonicalize

    def damaged(graph: Graph) -> Graph:
        graph = canonicalize(graph)
        node = next(graph.calls(reference.attention))
        node.kwargs = {**node.kwargs, "scale": node.kwargs["scale"] * 2}
        return graph

    monkeypatch.setattr(export, "canonicalize", damaged)
    with pytest.raises(UnsupportedModel, match="logits differ"):
        capture_directory(save_model(tmp_path))


def test_capture_streamed_refuses_a_graph_that_takes_one_weight_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = streamed.fill

    def swapped(model: Any, graph: Graph) -> None:
        fill(model, graph)
        k, v = (graph.weights[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "kv")
        k.stored, v.stored = v.stored, k.stored

    monkeypatch.setattr(streamed, "fill", swapped)
    with pytest.raises(UnsupportedModel, match="logits differ"):
        capture_directory(save_model(tmp_path))


def test_check_of_a_streamed_capture_knows_of_counts_when_weights_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def check(graph: Graph, model: Any, **options: Any) -> None:
        seen.append((options["counted"], model.lm_head.weight.std() > 0, 0 in model.lm_head.weight.stride()))

    monkeypatch.setattr(export, "count_from_positions", lambda graph: True)
    monkeypatch.setattr(export, "check_capture", check)
    assert on_disk(capture_directory(save_model(tmp_path)))
    assert seen == [(True, True, False)]


def test_capture_leaves_a_model_to_transformers_when_its_parameters_are_no_tensors_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed, "fits", lambda *given, **options: False)
    assert not on_disk(capture_directory(save_model(tmp_path)))


def test_random_weights_are_distinct_and_take_the_memory_of_the_largest() -> None:
    values = streamed.random_weights([(40, 16), (10, 16), (40, 16), (8, 32)])
    assert [tuple(v.shape) for v in values] == [(40, 16), (10, 16), (40, 16), (8, 32)]
    assert all(value.is_contiguous() for value in values)
    assert len({value.untyped_storage().data_ptr() for value in values[:3]}) == 1
    for one, other in itertools.combinations(values[:3], 2):
        assert not torch.isclose(one[:10], other[:10]).all(dim=1).any()
    assert abs(float(values[0].std()) - 0.25) < 0.03


def test_which_large_models_are_loaded_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("llama", "mixtral"):  # experts are stacked on loading
        tiny_model(name).save_pretrained(tmp_path / name)
    composite_model("gemma3").save_pretrained(tmp_path / "gemma3")
    sources = {name: open_source(tmp_path / name) for name in ("llama", "mixtral", "gemma3")}
    found = {name: streamed.is_loaded_whole(source) for name, source in sources.items()}
    assert found == {"llama": False, "mixtral": True, "gemma3": True}
    adapter: Any = object()
    assert streamed.is_loaded_whole(sources["llama"], [adapter])
    monkeypatch.setattr(streamed, "MAX_LOADED_BYTES", 1 << 40)
    assert not any(map(streamed.is_loaded_whole, sources.values()))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_hidden_layers": 3}, "has no tensor for model.layers.2.input_layernorm.weight"),
        (
            {"vocab_size": VOCABULARY + 1},
            rf"is \[{VOCABULARY}, 64\] in the checkpoint, and \[{VOCABULARY + 1}, 64\]",
        ),
    ],
)
def test_a_large_checkpoint_whose_config_is_of_another_model_is_refused_by_headers(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    """Before the estimate of memory, in which it would be a model to load whole."""
    file = save_model(tmp_path) / "config.json"
    config = {key: value for key, value in json.loads(file.read_text()).items() if key != "layer_types"}
    file.write_text(json.dumps(config | change))
    source = open_source(tmp_path)
    with pytest.raises(UnsupportedModel, match=reason):
        streamed.is_loaded_whole(source)
    with pytest.raises(UnsupportedModel, match=reason):
        capture_directory(tmp_path)


def test_capture_streamed_refuses_a_value_that_is_not_finite(tmp_path: Path) -> None:
    file = save_model(tmp_path) / "model.safetensors"
    values = load_file(file)
    values["model.embed_tokens.weight"][-1, 5] = float("nan")
    save_file(values, file, metadata={"format": "pt"})
    with pytest.raises(
        UnsupportedModel, match=r"the weight model\.embed_tokens\.weight has values that are NaN"
    ):
        capture_directory(tmp_path)
