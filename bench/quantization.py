"""Quality of quantizers on a model, measured through the runtime: mean KL and top-1 against the float32 model.

    python -m bench.quantization MODEL --tokens 20480 \
        --try 'rtn: {scheme: W4A16, group_size: 64}' --try 'gptq: {scheme: W4A16, group_size: 64}'

Each ``--try`` is the ``passes`` of a recipe, in YAML; the fusions come before. One JSON line a try.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from functools import partial
from typing import Any

import torch
import yaml

from optkit.bench.workload import load_tokenizer
from optkit.calibration import calibration_windows
from optkit.capture import capture_directory
from optkit.graph.ir import Graph
from optkit.graph.lower import lower
from optkit.model_source import resolve
from optkit.passes import load
from optkit.passes.base import PassContext
from optkit.quality import QualityReport, RuntimeLogits, compare_many, evaluation_windows
from optkit.target import get_target

FUSIONS: dict[str, Any] = {"fuse_qkv": {}, "fuse_gate_up": {}, "fuse_add_rms_norm": {}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--try", dest="tries", action="append", required=True)
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    source = resolve(arguments.model, print)
    graph = capture_directory(source.directory)
    limit = min(512, graph.meta.max_model_len)
    windows = evaluation_windows(load_tokenizer(str(source.directory)), arguments.tokens, limit)
    target = get_target("cpu")
    context = PassContext(
        target,
        partial(calibration_windows, directory=source.directory, max_length=graph.meta.max_model_len),
        tell=lambda text, part=None: None if part else print(text, flush=True),
    )
    candidates: dict[str, Any] = {}
    for text in arguments.tries:
        start = time.monotonic()
        candidate, stats = optimized(graph, FUSIONS | yaml.safe_load(text), context)
        took, load_average = round(time.monotonic() - start, 1), os.getloadavg()[0]
        facts = {"weight_bytes": candidate.num_bytes(), "seconds": took, "load": load_average, "stats": stats}
        print(json.dumps({"passes": text} | facts), flush=True)
        candidates[text] = RuntimeLogits(lower(candidate, target, consume=True))
    reports = compare_many(RuntimeLogits(lower(graph, target)), candidates, windows)
    for text, report in reports.items():
        print(json.dumps({"passes": text, "load": os.getloadavg()[0]} | quality(report)), flush=True)


def quality(report: QualityReport) -> dict[str, float]:
    """The figures that are quoted; divergences in nats."""
    return {
        "kl_mean": report.kl_mean.value,
        "kl_stderr": report.kl_mean.stderr,
        "kl_p99": report.kl_p99,
        "top1": report.top1_agreement.value,
        "ln_ppl_ratio": report.ln_ppl_ratio.value,
        "ln_ppl_ratio_stderr": report.ln_ppl_ratio.stderr,
        "tokens": report.tokens,
    }


def optimized(graph: Graph, passes: dict[str, Any], context: PassContext) -> tuple[Graph, dict[str, Any]]:
    """``graph`` after ``passes``, and what the last of them says of itself."""
    candidate, stats = graph.clone(), {}
    for name, options in passes.items():
        pass_class = load(name)
        optimization = pass_class(pass_class.Config.model_validate(options or {}))
        plan = optimization.check(candidate, context)
        stats = optimization.apply(candidate, plan, context).stats
    return candidate, stats


if __name__ == "__main__":
    main()
