"""Writes an artifact: the model, the graph, the recipe, the records; then the manifest, last."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from optkit import artifact_check
from optkit.artifact import INTERNAL, NATIVE, staging, write_manifest
from optkit.checkpoint_tensors import constants
from optkit.code_tier import cached_tier, copy_to
from optkit.graph import forms
from optkit.graph.ir import Graph
from optkit.graph.precision import compute_dtype
from optkit.graph.serialize import graph_to_json
from optkit.hf_layout import write_model
from optkit.model_source import ModelSource
from optkit.recipe import Recipe
from optkit.records import RunRecord
from optkit.report import report_html
from optkit.stored_layers import PACKED_FILE, runtime_tensors
from optkit.target import Target


def write_artifact(
    out: Path,
    graph: Graph,
    source: ModelSource,
    recipe: Recipe,
    run: RunRecord,
    target: Target,
    environment: dict[str, str],
    *,
    force: bool,
) -> None:
    """Write everything to a staging directory, check it in a new process, and publish it as ``out``.

    An artifact for a machine of another kind than this one can't be run here, so it is not checked.

    Raises:
        ArtifactDiffers: read back, it is not what ``graph`` computes; ``out`` is as it was.
    """
    with staging(out, force=force) as directory:
        internal = directory / INTERNAL
        internal.mkdir()
        write_model(forms.widest(graph), source.directory, directory)
        save_file(constants(graph), internal / "constants.safetensors")
        packed = runtime_tensors(graph)
        if packed:
            save_file(packed, internal / PACKED_FILE)
        if tier := cached_tier(graph, target):
            copy_to(tier, directory / NATIVE)
        report = {"model": source.name, "recipe": recipe.name, "target": asdict(target), **run.to_dict()}
        texts = {
            "graph.json": graph_to_json(graph),
            "recipe.yaml": recipe.to_yaml(),
            "report.json": json.dumps(report, indent=1) + "\n",
            "report.html": report_html(report),
        }
        for name, text in texts.items():
            (internal / name).write_text(text, "utf-8")
        write_manifest(directory, manifest(source, recipe, run, environment))
        if target.kind == "cpu" or torch.cuda.is_available():
            dtype = compute_dtype(recipe.runtime.compute_dtype)
            artifact_check.check_reopened(directory, graph, target, dtype)


def manifest(
    source: ModelSource, recipe: Recipe, run: RunRecord, environment: dict[str, str]
) -> dict[str, Any]:
    """The manifest's content besides the file list; reasons quote times, so they are in the report."""
    return {
        "name": source.name,
        "source": {"name": source.name, "digest": source.digest},
        "recipe": recipe.to_data(),
        "passes": [{"name": r.name, "decision": r.decision, "restored": r.restored} for r in run.passes],
        "environment": environment,
    }
