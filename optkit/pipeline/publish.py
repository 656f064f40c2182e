"""Writes an artifact: the model, the graph, the recipe, the records; then the manifest, last."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from optkit.artifact import measured_on
from optkit.artifact.manifest import INTERNAL, MANIFEST, NATIVE, write_manifest
from optkit.artifact.staging import staging
from optkit.checkpoint.compressed_tensors_writer import (
    PACKED_FILE,
    has_layer_without_format,
    runtime_tensors,
)
from optkit.checkpoint.hf_writer import write_codes, write_model
from optkit.checkpoint.locate import ModelSource
from optkit.checkpoint.safetensors_writer import save_tensors
from optkit.checkpoint.tensors import constants
from optkit.evaluation.text import text_digest
from optkit.graph import ops, variants
from optkit.graph.ir import Graph
from optkit.graph.ops.plugins import registered
from optkit.graph.serialize import graph_to_json
from optkit.lowering.precision import compute_dtype
from optkit.machine.target import Target
from optkit.pipeline import check
from optkit.pipeline.bake import bake, baked_records, planned_prompts
from optkit.pipeline.candidates import file_text
from optkit.pipeline.compile_hook import write_code
from optkit.pipeline.explain import misses
from optkit.pipeline.records import RunRecord
from optkit.pipeline.report import records_of
from optkit.pipeline.report_facts import facts
from optkit.pipeline.report_page import report_html
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
    """Write the artifact to a staging directory, check the files in a new process, and publish ``out``.

    An artifact for another kind of machine can't be run here and is not checked.

    Raises:
        ArtifactDiffers: the files, read back, give other logits than ``graph``; ``out`` is unchanged.
    """
    with staging(out, force=force) as directory:
        internal = directory / INTERNAL
        internal.mkdir()
        save_tensors(constants(graph), internal / "constants.safetensors")
        if has_layer_without_format(graph) and not recipe.files.float_copies:
            write_codes(graph, source.directory, directory, internal / PACKED_FILE)
        else:
            write_model(variants.widest(graph), source.directory, directory)
            if packed := runtime_tensors(graph):
                save_tensors(packed, internal / PACKED_FILE)
        write_code(graph, target, directory / NATIVE)
        (internal / "graph.json").write_text(graph_to_json(graph), "utf-8")
        (internal / "recipe.yaml").write_text(recipe.to_yaml(), "utf-8")
        write_baked(directory, source, recipe, run)
        report = {"model": source.name, "recipe": recipe.name, "target": asdict(target), **run.to_dict()}
        report |= {"missed_predictions": misses(records_of(run)), "environment": environment}
        report |= facts(graph, recipe, target)
        if digest := text_digest(recipe):
            report["evaluation"] = {"text": recipe.evaluation.text, "sha256": digest}
        if target.kind == "cpu":
            report["machine"] = measured_on.this_machine()
        texts = {
            "report.json": json.dumps(report, indent=1) + "\n",
            "report.html": report_html(report),
        }
        if target.kind == "cpu" and run.places:
            texts["candidates.json"] = file_text(run.places)
        for name, text in texts.items():
            (internal / name).write_text(text, "utf-8")
        write_manifest(directory, manifest(source, recipe, run, environment, plugins_of(graph)))
        if target.kind == "cpu" or torch.cuda.is_available():
            dtype = compute_dtype(recipe.runtime.compute_dtype)
            check.check_reopened(directory, graph, target, dtype)


def write_baked(directory: Path, source: ModelSource, recipe: Recipe, run: RunRecord) -> None:
    """Write the KV of the prompts of ``bake_prefix``; the pass is rolled back where the KV can't be reproduced."""
    records = baked_records(run.passes)
    if not records:
        return
    prompts = planned_prompts(records)
    write_manifest(directory, manifest(source, recipe, run, {}))  # the runtime opens finished artifacts alone
    try:
        found = bake(directory, prompts)
    finally:
        (directory / MANIFEST).unlink()
    reason = found.pop("refusal", None)
    for record in records:
        record.stats |= found
        if reason is not None:
            record.decided("rolled back", reason)


def plugins_of(graph: Graph) -> dict[str, dict[str, str]]:
    """Package and version of each plug-in whose ops are in ``graph``, by namespace."""
    records = [ops.record_of(node.target) for node in graph.fx.nodes if node.op == "call_function"]
    names = sorted({record.namespace for record in records if record and record.namespace})
    return {n: {"package": registered[n].package, "version": registered[n].version} for n in names}


def manifest(
    source: ModelSource,
    recipe: Recipe,
    run: RunRecord,
    environment: dict[str, str],
    plugged_in: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, Any]:
    """The manifest's content besides the file list, without reasons, which quote times.

    Args:
        plugged_in: of ``plugins_of``, without which the artifact can't be opened.
    """
    adapters = [{"name": adapter.name, "digest": adapter.digest} for adapter in source.adapters]
    optional = {"adapters": adapters, "notes": run.notes}
    plugged = {"plugins": plugged_in} if plugged_in else {}
    return plugged | {
        "name": source.name,
        "source": {"name": source.name, "digest": source.digest}
        | {key: value for key, value in optional.items() if value},
        "recipe": recipe.to_data(),
        "passes": [{"name": r.name, "decision": r.decision, "restored": r.fallback} for r in run.passes],
        "environment": environment,
    }
