"""Artifacts and records for tests: small, made in milliseconds, with a runnable graph where needed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import fx

from optkit.artifact.manifest import INTERNAL, write_manifest
from optkit.graph.ir import Graph, GraphMeta, Origin, Part, Weight
from optkit.kernels import reference
from optkit.machine.target import DATASHEETS
from optkit.pipeline.records import PassRecord, RunRecord

TARGET = asdict(DATASHEETS["cuda-h100"])
ROWS = 8

FAKE_FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": bytes(range(256)) * 8,
    "tokenizer.json": b"{}",
    "optkit/graph.json": b'{"nodes": []}',
    "optkit/constants.safetensors": b"\0" * 64,
    "optkit/recipe.yaml": b"schema_version: 1\nname: fake\n",
    "optkit/report.html": b"<!doctype html>",
    "optkit/report.json": b'{"passes": [], "whole": null}',
}


def fake_files(directory: Path) -> None:
    """The files of an artifact with made-up content, without the manifest."""
    (directory / INTERNAL).mkdir(parents=True)
    for name, content in FAKE_FILES.items():
        (directory / name).write_bytes(content)


def fake_artifact(directory: Path, name: str = "fake") -> Path:
    """A directory of made-up files with a correct manifest."""
    fake_files(directory)
    write_manifest(directory, {"name": name})
    return directory


def small_graph() -> Graph:
    """Embedding, choice of rows, output head: a language model without layers, vocabulary and width 8."""
    graph = fx.Graph()
    ids, index = graph.placeholder("input_ids"), graph.placeholder("logits_index")
    rows = graph.call_function(reference.embedding, (graph.get_attr("embed.weight"), ids))
    chosen = graph.call_function(reference.select_rows, (rows, index))
    graph.output(graph.call_function(reference.linear, (chosen, graph.get_attr("lm_head.weight"))))
    names = ("embed.weight", "lm_head.weight")
    weights = {n: Weight(torch.eye(ROWS), Origin((Part(n, ROWS),))) for n in names}
    return Graph(graph, weights, GraphMeta("llama", ROWS, 64, (), "embed.weight", "lm_head"))


def real_artifact(directory: Path, source: Path, recipe_text: str, run: RunRecord) -> Path:
    """An artifact of ``small_graph``, written by the artifact writer; ``source`` becomes its checkpoint."""
    from optkit.checkpoint.locate import ModelSource
    from optkit.pipeline.publish import write_artifact
    from optkit.recipe.load import parse_recipe

    graph = small_graph()
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "llama"}')
    save_file({name: weight.value for name, weight in graph.weights.items()}, source / "model.safetensors")
    model = ModelSource("small", source, "0" * 64)
    target = DATASHEETS["cuda-h100"]
    write_artifact(
        directory, graph, model, parse_recipe(recipe_text), run, target, {"optkit": "0"}, force=False
    )
    return directory


# -- records ---------------------------------------------------------------------------------------------


def estimate(value: float, stderr: float = 0.001) -> dict[str, float]:
    return {"value": value, "stderr": stderr}


def quality(kld: float = 0.004, top1: float = 0.98, ln_ppl_ratio: float = 0.003) -> dict[str, Any]:
    """A ``QualityReport`` as a dict."""
    return {
        "windows": 8,
        "tokens": 4088,
        "reference_ppl": estimate(12.2),
        "ppl": estimate(12.3),
        "ln_ppl_ratio": estimate(ln_ppl_ratio),
        "kl_mean": estimate(kld),
        "kl_median": kld / 2,
        "kl_p99": kld * 10,
        "kl_max": kld * 50,
        "top1_agreement": estimate(top1),
    }


def timing(seconds: float) -> dict[str, float]:
    return {"median": seconds, "q1": seconds * 0.9, "q3": seconds * 1.1}


def int8_record(**changes: Any) -> PassRecord:
    """A kept int8 pass: prefill measured 4x and 1x, decode 2x."""
    fields: dict[str, Any] = {
        "name": "int8",
        "config": {"lm_head": True},
        "sites": ["q_proj", "lm_head"],
        "skips": [{"reason": "on the ignore list", "count": 3, "first": "down_proj"}],
        "exact": False,
        "changed": 2,
        "predicted": {"prefill 128": [0.4, 0.1], "prefill 512": [0.4, 0.1], "decode@513": [0.04, 0.02]},
        "measured": {
            "prefill 128": [timing(0.4), timing(0.1)],
            "prefill 512": [timing(0.4), timing(0.4)],
            "decode@513": [timing(0.04), timing(0.02)],
        },
        "weight_bytes": [400_000_000, 100_000_000],
        "quality": quality(),
        "decision": "kept",
        "reason": "prefill 2.00x",
    }
    return PassRecord(**(fields | changes))


def sample_run() -> RunRecord:
    """A run with a kept int8 pass, a pass without a site, a pass that was rolled back, and the whole."""
    skipped = PassRecord("fuse_qkv", {}, [], [], decision="skipped", reason="no site to change")
    slower = int8_record(
        name="flash_attention", decision="rolled back", reason="prefill speedup 0.900 is below 1.000"
    )
    whole = int8_record(name="whole", reason="", sites=[], skips=[], config={})
    return RunRecord([int8_record(), skipped, slower], whole)
