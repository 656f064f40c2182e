"""An artifact with latent KV: what a run writes is read by transformers and served, with the logits of the source."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optkit.artifact.open import Artifact
from optkit.runtime.factory import open_engine
from optkit.runtime.types import SamplingParams
from tests.support.graphs import dense
from tests.support.model_directory import save_model
from tests.support.quick import quick
from tests.support.small_runs import IDS, decisions, run, transformers_logits
from tests.support.target import TARGET

PASSES = """
passes:
  latent_kv: {keep: always}
  select_logits_rows: {}
  flash_attention: {}
"""
BYTES = (32 + 8) * 2 * 4  # kv_lora_rank and qk_rope_head_dim, layers, float32


def test_artifact_with_latent_kv_has_the_logits_of_its_source_in_every_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch.setattr)
    source = save_model(tmp_path / "source", "deepseek_v3")
    record = run(source, tmp_path / "artifact", PASSES)
    assert decisions(record)["latent_kv"] == "kept"
    (latent,) = (entry for entry in record.passes if entry.name == "latent_kv")
    assert latent.stats["kv_bytes_per_token_after"] == BYTES
    expected = transformers_logits(source, IDS)
    assert torch.equal(transformers_logits(tmp_path / "artifact", IDS), expected)
    artifact = Artifact.open(tmp_path / "artifact")
    tolerance = {"atol": 1e-4 * max(1.0, float(expected.abs().max())), "rtol": 1e-4}
    torch.testing.assert_close(dense(artifact.graph(), IDS, TARGET), expected, **tolerance)
    engine = open_engine(str(tmp_path / "artifact"), kv_cache_bytes=64 * 8 * BYTES)
    assert engine.info().memory_plan.num_blocks == 64
    (answer,) = engine.generate([IDS.tolist()], SamplingParams(temperature=0.0, max_tokens=5))
    logits = transformers_logits(source, torch.tensor([*IDS.tolist(), *answer]))[len(IDS) - 1 : -1]
    assert logits.argmax(dim=1).tolist() == answer
