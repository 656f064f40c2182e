"""Peaks of memory by printed line, of a command whose memory is known."""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench import memory, random_llama

PROGRAM = """
import subprocess, sys, time
print("small", flush=True)
time.sleep(0.4)
held = bytearray(200 << 20)
print("large", flush=True)
time.sleep(0.4)
del held
print("child", flush=True)
subprocess.run([sys.executable, "-c", "import time; held = bytearray(300 << 20); time.sleep(0.6)"])
sys.exit(3)
"""


def test_measure_gives_the_peak_of_each_line_children_included() -> None:
    rows, status = memory.measure([sys.executable, "-c", PROGRAM])
    anon = {row.step: row.anon for row in rows}
    assert status == 3 and list(anon)[1:] == ["small", "large", "child"]
    assert anon["large"] > anon["child"] - (200 << 20) > 100 << 20
    assert anon["large"] >= 200 << 20 and anon["child"] >= 300 << 20
    assert all(row.seconds > 0.3 for row in rows[1:])


def test_memory_of_counts_private_pages_of_this_process() -> None:
    before = memory.memory_of(os.getpid())
    held = bytearray(64 << 20)
    after = memory.memory_of(os.getpid())
    assert after["anon"] - before["anon"] >= 60 << 20 and len(held)
    assert memory.memory_of(2**22 + 1) == {"rss": 0, "anon": 0, "file": 0}


def test_main_prints_rows_as_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["memory", "--json", "--", sys.executable, "-c", "print('a')"])
    assert memory.main() == 0
    assert [row["step"] for row in json.loads(capsys.readouterr().out)] == ["start", "a", "peak"]


def test_random_llama_writes_shards_that_transformers_loads(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    tiny = {**random_llama.SHAPES["8b"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}  # fmt: skip
    monkeypatch.setitem(random_llama.SHAPES, "8b", tiny)
    monkeypatch.setattr(random_llama, "SHARD_BYTES", 50_000)
    known = {"added_tokens": [{"id": 1, "content": "<s>"}], "model": {"vocab": {"a": 0, "b": 7}}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(known))
    random_llama.write_model(tmp_path / "m", "8b", tmp_path)
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 2
    vocabulary = json.loads((tmp_path / "m/tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    assert vocabulary["a"] == 0 and vocabulary["b"] == 7
    assert sorted([*vocabulary.values(), 1]) == list(range(300))  # every id of the model has a text
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert abs(float(model.lm_head.weight.float().std()) - 0.02) < 0.002


@pytest.mark.parametrize("shape", random_llama.SHAPES)
def test_config_of_is_a_llama_of_the_named_size(shape: str) -> None:
    config = random_llama.config_of(shape)
    count = sum(torch.Size(size).numel() for _, size in random_llama.shapes_of(config))
    assert {"300m": 0.23e9, "1b": 1.236e9, "8b": 8.03e9}[shape] == pytest.approx(count, rel=0.02)
    assert AutoConfig.for_model(**config).hidden_size == config["hidden_size"]
