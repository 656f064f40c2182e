"""Experts in int8 against float: time of an output token (TPOT), and the bytes of expert weights read for a token.

    python -m bench.models experts
    python -m bench.models experts --experts 64 --top 8 --threads 2 --rounds 9

A random ``qwen3_moe`` model, with the same fusions on both sides; ``int8`` has groups of 32 channels. Each round serves
a prompt by both engines, in turns; TPOT is the wall time from the first to the last token of an answer.

The bytes have two sides. The formula (docs/sizes.md) counts the packed weights of the experts in use. The other
side are the accessed bits of the memory pages of all expert weights, cleared before and counted after a decode step,
in a separate process without large pages. Both agree up to the pages at the ends of each piece of memory.

Exit code 1: TPOT is less than 2.0 times better, or the bytes differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.figures import command_line
from bench.models import accessed
from bench.models.random_model import ALONE, captured, changed, engine_of, executable, random_prompts, start
from optkit.bench.environment import environment
from optkit.graph.ir import Graph
from optkit.lowering.lower import Executable
from optkit.machine.load import load_average
from optkit.machine.present import present_target
from optkit.runtime.engine import Engine

LEAST_RATIO = 2.0
VOCABULARY = 4099  # a prime, so no other weight has as many rows as those of all experts
GROUP, PANEL = 32, 32
FUSIONS: dict[str, dict[str, Any]] = {
    "fuse_qkv": {},
    "fuse_add_rms_norm": {},
    "select_logits_rows": {},
    "flash_attention": {},
}
SIDES: dict[str, dict[str, dict[str, Any]]] = {
    "float": FUSIONS,
    "int8": {**FUSIONS, "int8": {"group_size": GROUP}},
}
PROMPT_TOKENS, WARM_STEPS, WATCHED_STEPS = 64, 3, 5


def main(arguments: Sequence[str]) -> int:
    parser = command_line("bench.models experts", __doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512, help="channels of the model")
    parser.add_argument("--width", type=int, default=384, help="channels of an expert")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top", type=int, default=8, help="experts of a token")
    parser.add_argument("--output-len", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=("tpot", "bytes"))
    parser.add_argument("--save-result", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    if args.child:
        accessed.small_pages()
        print(json.dumps(bytes_read(captured("qwen3_moe", fields(args)), args)))
        return 0
    before, result = environment(), dict[str, Any]()
    if args.only != "tpot":
        result |= in_a_process(arguments)
    if args.only != "bytes":
        result |= times(captured("qwen3_moe", fields(args)), args.output_len, args.rounds)
    result |= {"threads": args.threads, "load_average": [before["load_average"], load_average()]}
    show(result)
    if args.save_result:
        content = {"kind": "experts", "environment": before, "sizes": fields(args), **result}
        args.save_result.write_text(json.dumps(content, indent=1) + "\n")
    return int(bool(missed(result)))


def fields(args: argparse.Namespace) -> dict[str, Any]:
    """The configuration of the model."""
    return {
        "vocab_size": VOCABULARY, "hidden_size": args.hidden, "num_hidden_layers": args.layers, "head_dim": 64,
        "num_attention_heads": max(1, args.hidden // 64), "num_key_value_heads": max(1, args.hidden // 128),
        "num_experts": args.experts, "num_experts_per_tok": args.top, "moe_intermediate_size": args.width,
        "max_position_embeddings": 2048,
    }  # fmt: skip


# -- time --------------------------------------------------------------------------------------------------


def times(graph: Graph, num_tokens: int, rounds: int) -> dict[str, Any]:
    """TPOT of both sides in seconds, and the median of the rounds' ratios."""
    engines = {side: engine_of(sided(graph, side), kv_cache_bytes=64 << 20) for side in SIDES}
    prompts = random_prompts(rounds + 1, PROMPT_TOKENS, graph.meta.vocab_size)
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for number, prompt in enumerate(prompts):
        for side in list(SIDES) if number % 2 else list(SIDES)[::-1]:
            seconds = token_seconds(engines[side], prompt, num_tokens)
            if number:  # the first warms up
                found[side].append(seconds)
    ratios = [a / b for a, b in zip(found["float"], found["int8"], strict=True)]
    return {"tpot": found, "ratio": statistics.median(ratios), "least ratio": min(ratios)}


def sided(graph: Graph, side: str) -> Executable:
    return executable(changed(graph, SIDES[side], present_target("cpu")))


def token_seconds(engine: Engine, prompt: list[int], num_tokens: int) -> float:
    """Wall time of an output token after the first, of a request alone in the engine."""
    start(engine, prompt, num_tokens)
    arrivals = []
    while engine.has_work:
        arrivals += [time.perf_counter() for output in engine.step() for _ in output.token_ids]
    return (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1)


# -- bytes -------------------------------------------------------------------------------------------------


def in_a_process(arguments: Sequence[str]) -> dict[str, Any]:
    """``bytes_read`` in a process without large pages; empty where the system has no accessed bits."""
    if not accessed.is_available():
        return {}
    command = [sys.executable, "-m", "bench.models", "experts", *arguments, "--child"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def bytes_read(graph: Graph, args: argparse.Namespace) -> dict[str, Any]:
    """Bytes of expert weights read by a decode step of a single token, by formula and by accessed bits."""
    found: dict[str, Any] = {}
    for side in SIDES:
        model = sided(graph, side)
        weights = expert_weights(model, args.experts, args.hidden, args.width)
        found[f"{side}: bytes by formula"] = by_formula(side, args)
        found[f"{side}: bytes accessed"] = watched_steps(engine_of(model, kv_cache_bytes=64 << 20), weights)
        found[f"{side}: bytes of all experts"] = sum(w.numel() * w.itemsize for w in weights)
        found[f"{side}: pieces"], found[f"{side}: tensors"] = pieces(side, args), len(weights)
    return found


def by_formula(side: str, args: argparse.Namespace) -> int:
    """Bytes of the experts in use: L layers of J experts with the matrices [2 F, H] and [H, F]."""
    matrices = ((2 * args.width, args.hidden), (args.hidden, args.width))
    return args.layers * args.top * sum(matrix_bytes(side, n, k) for n, k in matrices)


def matrix_bytes(side: str, n: int, k: int) -> int:
    """Bytes read of a matrix [n, k] for a token: int8 has a scale (float32) for each row and group.

    The packed weight has sums of codes (int32), too. For a single row of activations the kernels do without.
    """
    if side == "float":
        return 4 * n * k
    rows = -(-n // PANEL) * PANEL
    return rows * k + 4 * rows * (k // GROUP)


def pieces(side: str, args: argparse.Namespace) -> int:
    """The pieces of memory read by a step: two matrices of an expert, in int8 with scales apart."""
    return args.layers * args.top * 2 * (2 if side == "int8" else 1)


def expert_weights(model: Executable, experts: int, hidden: int, width: int) -> list[Tensor]:
    """The weights of experts of ``model``, each once.

    Raises:
        ValueError: there are none: the layout of experts is not the described layout.
    """
    rows = (experts * 2 * width, experts * hidden)
    tensors = {t.data_ptr(): t for variant in model.variants for t in variant.tensors() if t.numel()}
    found = [t for t in tensors.values() if t.shape[0] in rows or (t.ndim == 4 and t.shape[0] == experts)]
    if not found:
        raise ValueError("the model has no weights of experts")
    return found


def watched_steps(engine: Engine, weights: Sequence[Tensor]) -> list[int]:
    """Bytes of ``weights`` read in each of a few decode steps."""
    watched, counts = accessed.Watched(weights), list[int]()
    (prompt,) = random_prompts(1, PROMPT_TOKENS, engine.runner.vocab_size)
    start(engine, prompt, WARM_STEPS + WATCHED_STEPS + 4)
    for _ in range(1 + WARM_STEPS):
        engine.step()
    for _ in range(WATCHED_STEPS):
        watched.clear()
        engine.step()
        counts.append(watched.accessed())
    engine.abort(ALONE)
    return counts


def differs(result: dict[str, Any], side: str) -> bool:
    """True where accessed bits and formula differ, in any step, by more than the pages at the ends of pieces.

    A piece of memory lies in up to two pages more than its size fills. Of each tensor the pages at both ends are not
    watched.
    """
    if f"{side}: bytes accessed" not in result:
        return False
    formula = result[f"{side}: bytes by formula"]
    least = formula - 2 * accessed.PAGE * result[f"{side}: tensors"]
    most = formula + 2 * accessed.PAGE * result[f"{side}: pieces"]
    return not all(least <= count <= most for count in result[f"{side}: bytes accessed"])


def missed(result: dict[str, Any]) -> list[str]:
    """The names of the results beyond their bounds."""
    slow = ["ratio"] * ("ratio" in result and not result["ratio"] >= LEAST_RATIO)
    return slow + [f"{side}: bytes accessed" for side in SIDES if differs(result, side)]


def show(result: dict[str, Any]) -> None:
    """Print the figures."""
    if "ratio" in result:
        tpot = {side: 1e3 * statistics.median(values) for side, values in result["tpot"].items()}
        print(
            f"TPOT float {tpot['float']:.2f} ms, int8 {tpot['int8']:.2f} ms: {result['ratio']:.2f}x "
            f"(least {result['least ratio']:.2f}x), at least {LEAST_RATIO}x"
        )
    for side in SIDES:
        if f"{side}: bytes accessed" in result:
            formula, steps = result[f"{side}: bytes by formula"], result[f"{side}: bytes accessed"]
            print(
                f"{side}: bytes of experts a token: {formula:,} by formula, {min(steps):,} to {max(steps):,} accessed "
                f"({max(steps) / formula:.3f}x), of {result[f'{side}: bytes of all experts']:,}"
            )
    low, high = result["load_average"]
    print(f"{result['threads']} threads, load average {low:.1f} to {high:.1f}", end="")
    print(f"; MISSED {', '.join(missed(result))}" if missed(result) else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
