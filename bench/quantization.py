"""Quality of quantizers on a model, measured through the runtime: mean KL and top-1 against the float32 model.

    python -m bench.quantization MODEL --tokens 20480 \\
        --try 'rtn: {scheme: W4A16, group_size: 64}' --try 'gptq: {scheme: W4A16, group_size: 64}'

Each ``--try`` is the ``passes`` section of a recipe, in YAML. The fusions run before, except fusions in ``--without``.
Tries run one after another, against reference logits that are computed once. Each try prints a JSON line.
``--save-result`` writes the figures of each finished try to a file and replaces earlier figures of the same try.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from bench.figures import command_line
from optkit.bench.environment import environment, public
from optkit.calibration.samples import calibration_windows
from optkit.capture import capture_directory
from optkit.checkpoint.locate import resolve
from optkit.evaluation.quality import (
    KeptLogits,
    QualityReport,
    RuntimeLogits,
    compare_many,
    evaluation_windows,
)
from optkit.graph.ir import Graph
from optkit.lowering.lower import lower
from optkit.machine.target import get_target
from optkit.passes import load
from optkit.passes.base import PassContext
from optkit.passes.quantization.cost import status
from optkit.text.load import load_tokenizer

KEPT_BYTES = 4 << 30  # of reference logits in memory: 22,000 tokens of a vocabulary of 49,152
FUSIONS = ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm")
WHERE = ("cpu", "isa", "cores", "optkit", "python", "packages")  # of the environment, kept with every result


def main() -> None:
    parser = command_line("bench.quantization", __doc__)
    parser.add_argument("model")
    parser.add_argument("--try", dest="tries", action="append", required=True)
    parser.add_argument("--without", action="append", default=[], choices=FUSIONS, help="leave a fusion out")
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-result", type=Path, metavar="FILE", help="add the figures to this JSON file")
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
        progress=lambda text, part=None: None if part else print(text, flush=True),
    )
    fusions = {name: {} for name in FUSIONS if name not in arguments.without}
    reference = KeptLogits(lambda: RuntimeLogits(lower(graph, target)), KEPT_BYTES)
    for text in arguments.tries:
        forget_peak()
        start, load_average = time.monotonic(), os.getloadavg()[0]
        candidate, stats = optimized(graph, fusions | yaml.safe_load(text), context)
        row = {
            "passes": text,
            "without": arguments.without,
            "threads": arguments.threads,
            "seconds": round(time.monotonic() - start, 1),
            "load_average": [load_average, os.getloadavg()[0]],
            "peak_bytes": status("VmHWM"),
            "weight_bytes": candidate.num_bytes(),
            "kv_bytes_of_float32": kv_bytes(candidate) / kv_bytes(graph),
            "stats": stats,
        }
        logits = RuntimeLogits(lower(candidate, target, consume=True))
        row |= quality(compare_many(reference, {text: logits}, windows)[text])
        print(json.dumps(row), flush=True)
        if arguments.save_result:
            save(arguments.save_result, arguments.model, row)


def quality(report: QualityReport) -> dict[str, float]:
    """The quoted figures; divergences in nats."""
    return {
        "kl_mean": report.kl_mean.value,
        "kl_stderr": report.kl_mean.stderr,
        "kl_p99": report.kl_p99,
        "top1": report.top1_agreement.value,
        "top1_stderr": report.top1_agreement.stderr,
        "ln_ppl_ratio": report.ln_ppl_ratio.value,
        "ln_ppl_ratio_stderr": report.ln_ppl_ratio.stderr,
        "tokens": report.tokens,
    }


def optimized(graph: Graph, passes: dict[str, Any], context: PassContext) -> tuple[Graph, dict[str, Any]]:
    """``graph`` after ``passes``, and the facts reported by the last pass."""
    candidate, stats = graph.clone(), {}
    for name, options in passes.items():
        pass_class = load(name)
        optimization = pass_class(pass_class.Config.model_validate(options or {}))
        plan = optimization.check(candidate, context)
        stats = optimization.apply(candidate, plan, context).stats
    return candidate, stats


def kv_bytes(graph: Graph) -> int:
    """Bytes of the KV cache per token."""
    return sum(spec.token_bytes for spec in graph.meta.kv_specs)


def forget_peak() -> None:
    """Reset the peak memory of the process, where the system allows."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def save(file: Path, model: str, row: dict[str, Any]) -> None:
    """Add ``row`` to ``file`` in the place of the row of the same try on the same amount of text."""
    around = environment()
    row |= {"command": command(row["passes"]), "time": around["time"]}
    row["environment"] = {key: around[key] for key in WHERE}
    old = json.loads(file.read_text("utf-8"))["results"] if file.is_file() else []
    kept = [other for other in old if identity(other) != identity(row)]
    text = json.dumps({"model": model, "results": [*kept, row]}, indent=1)
    file.write_text(text + "\n", "utf-8")


def command(text: str) -> str:
    """The command line of the process with ``text`` as the only try."""
    parts, skip = ["python", "-m", "bench.quantization"], False
    for part in sys.argv[1:]:
        if not skip and part != "--try":
            parts.append(public(part, Path.cwd()))
        skip = part == "--try"
    return shlex.join([*parts, "--try", text])


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["passes"], tuple(row["without"]), row["tokens"]


if __name__ == "__main__":
    main()
