"""Writes an artifact: the model, the graph, the recipe, the records; then the manifest, last."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from optkit.artifact.manifest import INTERNAL, NATIVE, write_manifest
from optkit.artifact.staging import staging
from optkit.checkpoint.compressed_tensors_writer import PACKED_FILE, runtime_tensors
from optkit.checkpoint.hf_writer import write_model
from optkit.checkpoint.locate import ModelSource
from optkit.checkpoint.tensors import constants
from optkit.graph import variants
from optkit.graph.ir import Graph
from optkit.graph.serialize import graph_to_json
from optkit.lowering.precision import compute_dtype
from optkit.machine.target import Target
from optkit.pipeline import check
from optkit.pipeline.compile_hook import write_code
from optkit.pipeline.records import RunRecord
from optkit.pipeline.report import report_html
from optkit.recipe.schema import Recipe


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
        write_model(variants.widest(graph), source.directory, directory)
        save_file(constants(graph), internal / "constants.safetensors")
        packed = runtime_tensors(graph)
        if packed:
            save_file(packed, internal / PACKED_FILE)
        write_code(graph, target, directory / NATIVE)
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
            check.check_reopened(directory, graph, target, dtype)


def manifest(
    source: ModelSource, recipe: Recipe, run: RunRecord, environment: dict[str, str]
) -> dict[str, Any]:
    """The manifest's content besides the file list; reasons quote times, so they are in the report."""
    return {
        "name": source.name,
        "source": {"name": source.name, "digest": source.digest},
        "recipe": recipe.to_data(),
        "passes": [{"name": r.name, "decision": r.decision, "restored": r.fallback} for r in run.passes],
        "environment": environment,
    }
