"""A run with an adapter: the artifact is the merged model, its manifest names the adapter, and steps are its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.adapters import ALPHA, RANK, linear_update, unmerged_logits, write_adapter
from tests.support.model_directory import save_model
from tests.support.small_runs import IDS, run, transformers_logits

V = "model.layers.1.self_attn.v_proj"


@pytest.mark.usefixtures("quick")
def test_optimize_writes_the_merged_model_when_an_adapter_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(1)
    source, updates = save_model(tmp_path / "model"), {V: linear_update(32, 64)}
    adapter = write_adapter(tmp_path / "mine", updates)
    run(source, tmp_path / "plain", "passes: {}")
    record = run(source, tmp_path / "merged", "passes: {fuse_qkv: {}}", adapters=[adapter])
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    expected = unmerged_logits(base, updates, {V: ALPHA / RANK}, IDS)
    given = transformers_logits(tmp_path / "merged", IDS)
    torch.testing.assert_close(given.double(), expected, atol=1e-4, rtol=1e-4)
    assert (given - transformers_logits(tmp_path / "plain", IDS)).abs().max() > 0.05
    (note,) = record.notes
    written = json.loads((tmp_path / "merged/optkit/manifest.json").read_text())["source"]
    assert written["notes"] == [note] and "adapter mine merged" in note
    assert [entry["name"] for entry in written["adapters"]] == ["mine"]
    assert "adapter mine merged" in (tmp_path / "merged/optkit/report.html").read_text()
