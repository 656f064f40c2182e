"""The files of a state: only what its parent lacks, and float layers that a loaded state falls back to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from optkit.artifact.open import Artifact
from optkit.checkpoint.insertion import fall_back, float_origins, quantized_sites
from optkit.graph.ir import Graph
from optkit.graph.serialize import graph_to_json
from optkit.lowering.lower import lower
from optkit.pipeline.cache import PassCache
from optkit.pipeline.state import TENSORS, State
from optkit.pipeline.step import Step
from tests.support.architectures import tiny_model
from tests.support.graphs import apply, captured, dense, random_ids
from tests.support.model_directory import VOCABULARY
from tests.support.small_runs import TTFT_CPU, run
from tests.support.target import TARGET

ROOT = Step("0" * 32)
(IDS,) = random_ids([19], VOCABULARY)


@pytest.fixture
def cache(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PassCache:
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    return PassCache(source)


def model() -> Graph:
    return captured("llama", vocab_size=VOCABULARY, max_position_embeddings=1024)


def after(cache: PassCache, parent: State | None, graph: Graph) -> State:
    """A state that follows ``parent``, saved and read back."""
    step = parent.step.then({"number": len(parent.places)}) if parent else ROOT
    return cache.resume(step, parent, lambda: (graph, {}))


def passed(state: State, *names: str, **options: object) -> Graph:
    graph = state.graph.clone()
    for name in names:
        apply(graph, name, **options)
    return graph


def stored(cache: PassCache, state: State) -> set[str]:
    """Names of the tensors in the files of ``state``."""
    return set(load_file(cache.root / state.step.key / TENSORS))


def test_capture_stores_only_constants(cache: PassCache) -> None:
    state = after(cache, None, model())
    assert stored(cache, state) == {"constant:model.rotary_emb.inv_freq"}


def test_fused_weights_are_stored_nowhere_again(cache: PassCache) -> None:
    first = after(cache, None, model())
    fused = after(cache, first, passed(first, "fuse_qkv", "fuse_gate_up"))
    assert stored(cache, fused) == set()
    again = PassCache(cache.source.directory).load(fused.step)
    assert again is not None and graph_to_json(again.graph) == graph_to_json(fused.graph)
    assert torch.equal(dense(again.graph, IDS), dense(fused.graph, IDS))


def test_state_stores_the_difference_to_its_parent(cache: PassCache) -> None:
    first = after(cache, None, model())
    smooth = after(cache, first, passed(first, "smoothquant"))
    few = after(cache, smooth, passed(smooth, "rtn", scheme="W8A8", targets=["re:.*mlp.*"]))
    names = {
        f"model.layers.{layer}.mlp.{linear}_proj" for layer in (0, 1) for linear in ("gate", "up", "down")
    }
    assert stored(cache, few) == {f"{n}.{key}" for n in names for key in ("weight", "weight_scale")}
    assert all(
        few.graph.weights[n].value is w.value for n, w in smooth.graph.weights.items() if "mlp" not in n
    )


@pytest.mark.parametrize("options", [{"scheme": "W4A16"}, {"scheme": "W8A8", "max_tokens": 4}])
def test_loaded_state_falls_back_to_the_float_layers(cache: PassCache, options: dict[str, object]) -> None:
    first = after(cache, None, model())
    smooth = after(cache, first, passed(first, "fuse_qkv", "smoothquant"))
    quantized = after(cache, smooth, passed(smooth, "rtn", **options))
    assert not any(name.startswith("float:") for name in stored(cache, quantized))  # they lie in the parent
    other = PassCache(cache.source.directory).load(quantized.step)
    assert other is not None
    sites = quantized_sites(other.graph)
    assert len(sites) == 2 * 5 and sites.keys() == quantized_sites(quantized.graph).keys()
    few = IDS[:4]  # the variant for few tokens, where there are two
    expected = dense(smooth.graph, few)
    assert not torch.equal(dense(other.graph, few), expected)
    assert torch.equal(dense(fall_back(other.graph, sites), few), expected)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_loaded_state_falls_back_to_the_float_experts(cache: PassCache, family: str) -> None:
    """Experts in one tensor [E, K, N], and in a tensor each."""
    first = after(cache, None, captured(family))
    quantized = after(cache, first, passed(first, "w4a8", group_size=32))
    other = PassCache(cache.source.directory).load(quantized.step)
    assert other is not None
    sites = quantized_sites(other.graph)
    assert any(site.endswith("experts.down_proj") for site in sites)
    ids = IDS % 128
    assert not torch.equal(dense(other.graph, ids), dense(first.graph, ids))
    assert torch.equal(dense(fall_back(other.graph, sites), ids), dense(first.graph, ids))


def test_loaded_state_restores_a_shared_table_of_the_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float and int8 tensors have the same name in the checkpoint; a later state keeps both apart."""
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    cache = PassCache(tmp_path / "tied")
    first = after(cache, None, captured("llama", tie_word_embeddings=True))
    options = {"lm_head": True, "weight_only": ["lm_head"], "embedding": True}
    second = after(cache, first, passed(first, "int8", **options))
    third = after(cache, second, passed(second, "flash_attention"))
    assert {"model.embed_tokens.weight", "model.embed_tokens.weight_scale"} <= stored(cache, second)
    assert not any("embed_tokens" in name for name in stored(cache, third))
    (ids,) = random_ids([19])
    for state in (second, third):
        again = PassCache(cache.source.directory).load(state.step)
        assert again is not None and graph_to_json(again.graph) == graph_to_json(state.graph)
        floats = fall_back(again.graph, quantized_sites(again.graph))
        assert torch.equal(dense(floats, ids), dense(first.graph, ids))


def test_float_layers_that_a_pass_changed_itself_are_stored_with_it(cache: PassCache) -> None:
    """awq scales weights before it rounds them: its float layers are in no earlier state."""
    first = after(cache, None, model())
    options = {"scheme": "W4A16", "group_size": 32, "calibration": {"samples": 2, "length": 32}}
    made = passed(first, "awq", **options)
    expected = dense(fall_back(made, quantized_sites(made)), IDS)
    state = after(cache, first, made)
    assert any(name.startswith("float:") for name in stored(cache, state))
    later = after(cache, state, passed(state, "flash_attention"))
    assert stored(cache, later) == set()
    other = PassCache(cache.source.directory).load(later.step)
    assert other is not None and len(float_origins(other.graph)) == 2 * 7
    assert torch.equal(dense(fall_back(other.graph, quantized_sites(other.graph)), IDS), expected)


def test_state_is_absent_when_a_state_that_it_needs_is_gone_or_damaged(cache: PassCache) -> None:
    first = after(cache, None, model())
    smooth = after(cache, first, passed(first, "smoothquant"))
    fused = after(cache, smooth, passed(smooth, "fuse_qkv"))
    file = cache.root / smooth.step.key / TENSORS
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    other = PassCache(cache.source.directory)
    assert other.load(fused.step) is None
    assert not (cache.root / fused.step.key).exists()
    assert other.load(first.step) is not None


def test_removal_takes_a_state_before_those_it_needs(cache: PassCache) -> None:
    first = after(cache, None, model())
    smooth = after(cache, first, passed(first, "smoothquant"))
    fused = after(cache, smooth, passed(smooth, "fuse_qkv"))
    times = [(cache.root / state.step.key).stat().st_mtime_ns for state in (fused, smooth)]
    assert times == sorted(times)


@pytest.mark.usefixtures("quick")
def test_a_state_keeps_graph_and_tensors(source: Path, tmp_path: Path) -> None:
    """What a resumed run continues from is, to the bit, what the interrupted one had."""
    run(source, tmp_path / "out", TTFT_CPU)
    graph = Artifact.open(tmp_path / "out").graph()
    states = PassCache(source)
    states.save(Step("0" * 32), graph, {"name": "kept"}, None)
    found = states.load(Step("0" * 32))
    assert found is not None and found.record == {"name": "kept"}
    assert graph_to_json(found.graph) == graph_to_json(graph)
    assert all(torch.equal(found.graph.weights[name].value, w.value) for name, w in graph.weights.items())
    assert lower(found.graph, TARGET).kernels == lower(graph, TARGET).kernels
    assert states.load(Step("1" * 32)) is None


@pytest.mark.parametrize(
    "file", ["graph.json", "tensors.safetensors", "index.json", "record.json", "sums.json"]
)
def test_a_damaged_state_is_none_and_goes(cache: PassCache, file: str) -> None:
    states = cache
    states.save(Step("2" * 32), captured("llama"), {"name": "kept"}, None)
    place = states.root / ("2" * 32) / file
    content = bytearray(place.read_bytes())
    content[len(content) // 2] ^= 1
    place.write_bytes(content)
    assert states.load(Step("2" * 32)) is None
    assert not place.parent.exists()


def test_loaded_state_has_the_head_that_a_pass_untied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    cache = PassCache(tmp_path / "tied")
    first = after(cache, None, captured("llama", tie_word_embeddings=True))
    rotated = after(cache, first, passed(first, "rotate"))
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= stored(cache, rotated)
    quantized = after(cache, rotated, passed(rotated, "int8", lm_head=True))
    other = PassCache(tmp_path / "tied").load(quantized.step)
    assert other is not None
    ids = IDS % 128
    float_again = fall_back(other.graph, quantized_sites(other.graph))
    assert torch.equal(dense(float_again, ids), dense(rotated.graph, ids))
    torch.testing.assert_close(dense(float_again, ids), dense(first.graph, ids), atol=2e-4, rtol=1e-4)
