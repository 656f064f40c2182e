"""Tries of passes on a model: time, bytes, and quality against the model on held-out text, through the runtime."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.figures import command_line
from bench.quantization import FUSIONS, KEPT_BYTES, WHERE, optimized, quality
from optkit.bench.environment import environment
from optkit.calibration.samples import calibration_windows
from optkit.capture import capture_directory
from optkit.checkpoint.locate import resolve
from optkit.evaluation.quality import KeptLogits, RuntimeLogits, compare_many, evaluation_windows
from optkit.lowering.lower import lower
from optkit.machine.target import get_target
from optkit.passes.base import PassContext
from optkit.text.load import load_tokenizer

Row = dict[str, Any]


def parser(figure: str, description: str | None) -> argparse.ArgumentParser:
    """The options of every figure."""
    made = command_line(f"bench.smaller {figure}", description)
    made.add_argument("model")
    made.add_argument("--tokens", type=int, default=8192, help="of held-out text")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--save-result", type=Path, metavar="FILE", help="write the figures to this JSON file")
    return made


def run(arguments: argparse.Namespace, tries: Mapping[str, Mapping[str, Any]]) -> dict[str, Row]:
    """The figures of each of ``tries``, names with the passes after the fusions; a line is printed for each."""
    torch.set_num_threads(arguments.threads)
    source = resolve(arguments.model, print)
    graph, target = capture_directory(source.directory), get_target("cpu")
    limit = min(512, graph.meta.max_model_len)
    windows = evaluation_windows(load_tokenizer(str(source.directory)), arguments.tokens, limit)
    text = partial(calibration_windows, directory=source.directory, max_length=graph.meta.max_model_len)
    reference = KeptLogits(lambda: RuntimeLogits(lower(graph, target)), KEPT_BYTES)
    found: dict[str, Row] = {}
    for name, passes in tries.items():
        start, busy = time.monotonic(), time.process_time()
        candidate, stats = optimized(
            graph, dict.fromkeys(FUSIONS) | dict(passes), PassContext(target, text, source=graph)
        )
        row: Row = {
            "seconds": time.monotonic() - start,
            "processor_seconds": time.process_time() - busy,
            "weight_bytes": candidate.num_bytes(),
            "load_average": os.getloadavg()[0],
            "stats": stats,
        }
        logits = RuntimeLogits(lower(candidate, target, consume=True))
        found[name] = row | quality(compare_many(reference, {name: logits}, windows)[name])
        print(line(name, found[name]), flush=True)
    if arguments.save_result:
        around = environment()
        saved = {"model": arguments.model, "tries": found, "environment": {key: around[key] for key in WHERE}}
        arguments.save_result.write_text(json.dumps(saved, indent=1) + "\n", "utf-8")
    return found


def line(name: str, row: Row) -> str:
    """A try for people."""
    return (
        f"{name:32} KL {row['kl_mean']:.4f} +- {row['kl_stderr']:.4f}  top-1 {row['top1']:.2%}  "
        f"ln PPL ratio {row['ln_ppl_ratio']:+.4f}  {row['weight_bytes'] / 1e6:.0f} MB  "
        f"{row['seconds']:.0f} s ({row['processor_seconds']:.0f} s of processors)"
    )
