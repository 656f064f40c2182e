"""Tensor parallel: logits and tokens of ranks against a single process, weights of a rank, and the exchange alone.

    python -m bench.fleet.tensor_parallel --float baseline-artifact/ --int8 artifact/ --size 3

``--float`` and ``--int8`` are artifacts of the same model, by the recipes ``baseline`` and ``ttft-cpu``; ``--model``
is the model for transformers, which is the other side of the float logits.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

from bench.figures import command_line
from optkit.artifact.open import Artifact
from optkit.kernels.cpu import native
from optkit.kernels.cpu.shared_memory import SharedRank, SharedRegion
from optkit.lowering.dense import dense_inputs
from optkit.lowering.lower import lower
from optkit.machine.present import present_target
from optkit.parallel.check import compare, rank_logits
from optkit.parallel.rank_graph import rank_graph
from optkit.runtime.factory import open_engine
from optkit.runtime.types import SamplingParams

PROMPT = "The exchange of tensors between processes costs time, so a model is shared out only where"
SIZES = {"2.3 KB": 576, "9.2 KB": 2304, "1.2 MB": 300_000}  # floats: a token of 576 channels, and 520 tokens
ROUNDS, BLOCKS = 400, 15
TOKENS = 48


def float_logits(directory: str, model: str, size: int) -> dict[str, Any]:
    """Errors of the logits of ``size`` ranks against the unshared graph, and against transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = torch.tensor(AutoTokenizer.from_pretrained(directory)(PROMPT)["input_ids"])
    graph, target = Artifact.open(directory).graph(), present_target("cpu")
    expected = lower(graph, target)(dense_inputs([len(ids)], ids, graph.meta.states))
    found = rank_logits(graph, size, ids, target)
    with torch.inference_mode():
        eager = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
        reference = eager(ids[None]).logits[0]
    return {
        "against one process": max(float((each - expected).abs().max()) for each in found),
        "against transformers": max(float((each - reference).abs().max()) for each in found),
        "one process against transformers": float((expected - reference).abs().max()),
        "ranks agree": all(torch.equal(found[0], each) for each in found),
    }


def int8_logits(directory: str, size: int) -> dict[str, Any]:
    """True where the logits of ``size`` ranks have the bits of the unshared graph, by the kernels of the server."""
    graph = Artifact.open(directory).graph()
    ids = torch.arange(3, 60) % graph.meta.vocab_size
    found = compare(graph, size, ids, present_target("cpu"))
    return {"bits equal": found.is_equal, "error": found.error}


def weights(directory: str, size: int) -> dict[str, Any]:
    """Bytes of each rank's weights, and their share of the whole model's."""
    graph = Artifact.open(directory).graph()
    head = max(w.nbytes for w in graph.weights.values() if w.shape[0] == graph.meta.vocab_size)
    whole = graph.num_bytes()
    parts = [rank_graph(graph, rank, size).num_bytes() for rank in range(size)]
    return {
        "whole": whole,
        "ranks": parts,
        "share": max(parts) / whole,
        "bound": (0.4 * whole + head) / whole,
    }


def tokens(directory: str, size: int) -> dict[str, Any]:
    """Greedy tokens of an engine of ``size`` processes against a single process, and seconds."""
    prompts = [list(range(5, 5 + n)) for n in (3, 40, 300)]
    found: dict[str, Any] = {}
    for ranks in (1, size):
        engine = open_engine(directory, tensor_parallel_size=ranks, threads=1)
        start = time.perf_counter()
        found[str(ranks)] = engine.generate(prompts, SamplingParams(max_tokens=TOKENS, temperature=0.0))
        found[f"seconds, {ranks} ranks"] = time.perf_counter() - start
        if ranks > 1:
            engine.runner.ranks.close()  # type: ignore[attr-defined]
    equal = found.pop("1") == found.pop(str(size))
    return {"tokens equal": equal, **found}


def exchange(size: int) -> dict[str, Any]:
    """Microseconds of an all-reduce between ``size`` processes, by the size of the message."""
    region = SharedRegion(size)
    os.set_inheritable(region.fd, True)
    command = [
        sys.executable,
        "-m",
        "bench.fleet.tensor_parallel",
        "--region",
        str(region.fd),
        "--size",
        str(size),
    ]
    others = [
        subprocess.Popen([*command, "--rank", str(rank)], pass_fds=[region.fd], stdout=subprocess.DEVNULL)
        for rank in range(1, size)
    ]
    try:
        return timed(region, 0)
    finally:
        for process in others:
            process.wait(60)


def timed(region: SharedRegion, rank: int) -> dict[str, Any]:
    """The measurement of a rank, on a separate core where there are enough."""
    torch.set_num_threads(1)
    own = SharedRank(region, rank)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if cores:
        os.sched_setaffinity(0, {sorted(cores)[rank % len(cores)]})
    try:
        return {name: rounds_of(own, count) for name, count in SIZES.items()}
    finally:
        if cores:
            os.sched_setaffinity(0, cores)


def rounds_of(own: SharedRank, count: int) -> dict[str, float]:
    """Time and bandwidth of all-reduces of ``count`` floats: the median and the least of ``BLOCKS`` blocks."""
    reduce, x, out = native.library().optkit_all_reduce, torch.randn(count), torch.empty(count)
    arguments = (own.handle, x.data_ptr(), out.data_ptr(), 1, count, 0, 1)
    rounds = max(20, ROUNDS * 576 // count)
    times = []
    for _ in range(BLOCKS):
        start = time.perf_counter()
        for _ in range(rounds):
            reduce(*arguments)
        times.append((time.perf_counter() - start) / rounds * 1e6)
    median = statistics.median(times)
    return {"us": median, "least us": min(times), "GB/s": count * 4 / median / 1e3}


def main(arguments: list[str]) -> int:
    parser = command_line("bench.fleet tensor_parallel", __doc__)
    parser.add_argument("--float", dest="float_artifact", help="artifact of the recipe baseline")
    parser.add_argument("--int8", dest="int8_artifact", help="artifact of the recipe ttft-cpu")
    parser.add_argument(
        "--model", help="the model's directory, for transformers; by default the float artifact"
    )
    parser.add_argument("--size", type=int, default=3, help="ranks")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--region", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.rank is not None:
        timed(SharedRegion(given.size, given.region), given.rank)
        return 0
    result: dict[str, Any] = {f"exchange, {n} processes": exchange(n) for n in (2, given.size)}
    result["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if given.float_artifact:
        model = given.model or given.float_artifact
        result["float logits"] = float_logits(given.float_artifact, model, given.size)
        result["float tokens"] = tokens(given.float_artifact, given.size)
        result["float weights"] = weights(given.float_artifact, given.size)
    if given.int8_artifact:
        result["int8 logits"] = int8_logits(given.int8_artifact, given.size)
        result["int8 tokens"] = tokens(given.int8_artifact, given.size)
        result["int8 weights"] = weights(given.int8_artifact, given.size)
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
