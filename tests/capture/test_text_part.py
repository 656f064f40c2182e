"""The text decoder of a multimodal checkpoint has the logits of the whole model on text, by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from optkit.capture import capture_directory
from optkit.checkpoint.adapter import read_adapter
from optkit.checkpoint.source import open_source
from optkit.checkpoint.text_part import text_names
from optkit.errors import UnsupportedModel
from tests.support.adapters import ALPHA, RANK, linear_update, write_adapter
from tests.support.composite import COMPOSITES, composite_model, text_logits
from tests.support.graphs import dense, random_ids

PROMPT = random_ids([33], 100)[0]
TYPES = {"gemma3": "gemma3_text", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "mistral3": "mistral"}


@pytest.mark.parametrize("name", sorted(COMPOSITES))
def test_capture_directory_has_the_logits_of_the_multimodal_model(name: str, tmp_path: Path) -> None:
    model = composite_model(name)
    model.save_pretrained(tmp_path)
    graph = capture_directory(tmp_path)
    torch.testing.assert_close(dense(graph, PROMPT), text_logits(model, PROMPT), atol=1e-4, rtol=1e-4)
    (note,) = graph.notes
    assert (
        graph.meta.model_type == TYPES[name] and f"the text decoder ({TYPES[name]}) of a {name} model" in note
    )


@pytest.mark.parametrize("name", sorted(COMPOSITES))
def test_open_source_leaves_other_parts_unread(name: str, tmp_path: Path) -> None:
    composite_model(name).save_pretrained(tmp_path)
    source = open_source(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert {name.partition(".")[0] for name in source} <= {"model", "lm_head"}
    assert not any("vis" in name or "projector" in name for name in source) and len(source) < len(stored)
    assert torch.equal(
        source["model.embed_tokens.weight"], stored[source.text.stored["model.embed_tokens.weight"]]
    )


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_capture_directory_reads_both_forms_of_names(prefix: str, tmp_path: Path) -> None:
    model = composite_model("gemma3")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    source = open_source(tmp_path)
    decoder = {prefix + name.removeprefix("model."): source[name].clone() for name in source}
    others = {n: t for n, t in load_file(file).items() if n not in source.text.stored.values()}
    save_file(decoder | others, file, metadata={"format": "pt"})
    torch.testing.assert_close(
        dense(capture_directory(tmp_path), PROMPT), text_logits(model, PROMPT), atol=1e-4, rtol=1e-4
    )


def test_capture_directory_without_weights_has_the_same_ops(tmp_path: Path) -> None:
    composite_model("qwen3_vl").save_pretrained(tmp_path)
    whole, empty = capture_directory(tmp_path), capture_directory(tmp_path, weights=False)
    assert [(n.op, str(n.target)) for n in empty.fx.nodes] == [(n.op, str(n.target)) for n in whole.fx.nodes]


def test_capture_directory_names_a_missing_tensor_of_the_decoder(tmp_path: Path) -> None:
    composite_model("gemma3").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors[next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight"))]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"no tensor for model\.layers\.1\.mlp\.up_proj\.weight"):
        capture_directory(tmp_path)


def test_open_source_refuses_a_decoder_without_a_text_model(tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model("glm4v").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "text_config" in config
    with pytest.raises(UnsupportedModel, match="no text model for the decoder of glm4v"):
        open_source(tmp_path, weights=False)


def test_text_names_keeps_flat_names_only_without_prefixed_ones() -> None:
    flat = {
        "model.layers.0.mlp.up_proj.weight",
        "model.norm.weight",
        "visual.blocks.0.w",
        "lm_head.weight",
        "mtp.w",
    }
    assert set(text_names(flat)) == {
        "model.layers.0.mlp.up_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    }
    prefixed = {
        "model.language_model.norm.weight",
        "model.visual.w",
        "model.layers.0.w",
        "language_model.lm_head.weight",
    }
    assert set(text_names(prefixed)) == {"model.norm.weight", "lm_head.weight"}


@pytest.mark.parametrize("tied", [False, True])
def test_a_decoder_without_a_head_in_its_files_is_tied_only_by_its_configuration(
    tmp_path: Path, tied: bool
) -> None:
    model = composite_model("gemma3", tie_word_embeddings=tied)
    model.config.tie_word_embeddings = tied
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: t for name, t in load_file(file).items() if not name.endswith("lm_head.weight")}
    save_file(tensors, file, metadata={"format": "pt"})
    if tied:
        assert open_source(tmp_path).info.config["tie_word_embeddings"] is True
        return
    with pytest.raises(UnsupportedModel, match=r"no tensor for lm_head\.weight"):
        open_source(tmp_path)


def test_an_adapter_of_the_multimodal_model_is_merged_into_its_decoder(tmp_path: Path) -> None:
    composite_model("gemma3").save_pretrained(tmp_path / "model")
    inner = "layers.0.self_attn.q_proj"
    plain = capture_directory(tmp_path / "model").weights[f"model.{inner}.weight"].value
    rows, columns = plain.shape
    torch.manual_seed(1)
    update = linear_update(rows, columns)
    for prefix in ("model.language_model.", "language_model.model.", "model."):
        directory = write_adapter(tmp_path / prefix.replace(".", "-"), {prefix + inner: update})
        graph = capture_directory(tmp_path / "model", adapters=[read_adapter(directory)])
        change = ALPHA / RANK * (update["lora_B.weight"].double() @ update["lora_A.weight"].double())
        torch.testing.assert_close(
            graph.weights[f"model.{inner}.weight"].value.double(),
            plain.double() + change,
            atol=1e-5,
            rtol=1e-5,
        )
