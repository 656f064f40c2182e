"""A run on a multimodal checkpoint: the artifact is a text model that plain transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.support.composite import composite_model, text_logits
from tests.support.model_directory import VOCABULARY, save_model
from tests.support.small_runs import IDS, run, transformers_logits


@pytest.mark.usefixtures("quick")
def test_optimize_writes_a_text_model_when_the_checkpoint_is_multimodal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    source, out, model = (
        tmp_path / "model",
        tmp_path / "out",
        composite_model("qwen3_vl", vocab_size=VOCABULARY),
    )
    save_model(source)  # for its tokenizer
    model.save_pretrained(source)
    (source / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    record = run(source, out, "passes: {fuse_qkv: {}}")
    torch.testing.assert_close(transformers_logits(out, IDS), text_logits(model, IDS), atol=1e-4, rtol=1e-4)
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "qwen3" and config["architectures"] == ["Qwen3ForCausalLM"]
    with safe_open(out / "model.safetensors", framework="pt") as file:
        assert {name.partition(".")[0] for name in file.keys()} <= {"model", "lm_head"}  # noqa: SIM118
    assert (out / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    assert "text decoder (qwen3) of a qwen3_vl model" in record.notes[0]
