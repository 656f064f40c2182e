"""Block-sparse prefill: TTFT, density and the loss at the last position, against dense attention.

    python -m bench.long sparse_prefill artifact/
    python -m bench.long sparse_prefill artifact/ --tokens 4096 --cover 0.9 0.95 --rounds 0

The pass ``sparse_prefill`` is applied to the artifact's graph in memory; both models share the packed weights. TTFT:
two engines without prefix cache, the same prompts of the evaluation text in turn. The ratio is the median over rounds;
CPU time is the second witness. KL: of the distribution behind the last token, and the mean over the last 64 positions,
over ``--prompts`` prompts. Exit code 1: a bound is missed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.bounds import beyond, print_numbers
from bench.figures import command_line
from bench.long._prefill import Texts, in_turn, kl, load_average, logprobs, ratios
from optkit.artifact.open import Artifact
from optkit.graph.ir import Graph
from optkit.graph.variants import SharedWeights
from optkit.kernels.cpu.attention import sparse_tiles
from optkit.lowering.lower import Executable
from optkit.machine.present import present_target
from optkit.passes.base import PassContext
from optkit.passes.sparse_prefill import SparsePrefill, SparsePrefillConfig
from optkit.recipe.engine_options import engine_options
from optkit.runtime.engine import Engine
from optkit.runtime.factory import make_engine
from optkit.runtime.scheduling.cost_model import CostModel
from optkit.runtime.sizing import scheduler_config
from optkit.runtime.types import SamplingParams

RATIOS = {512: 1.02, 1024: 1.02, 4096: 0.75, 8192: 0.6}  # most of dense, by length
MOST_KL = 0.02  # nats at the last position, mean over prompts
MARGIN = 8  # tokens of a context left for the answer
LAST = 64


def sparse(graph: Graph, cover: float, target: Any) -> Graph:
    """``graph`` after the pass, without the measurement of its density."""
    changed = graph.clone()
    optimization = SparsePrefill(SparsePrefillConfig(cover=cover, measure_tokens=0))
    context = PassContext(target)
    plan = optimization.check(changed, context)
    if not plan.sites:
        raise SystemExit(f"nothing to change: {plan.skips[0].reason if plan.skips else 'no attention'}")
    optimization.apply(changed, plan, context)
    return changed


def engine_of(artifact: Artifact, model: Executable) -> Engine:
    given = {"enable_prefix_caching": False, "speculative_model": "none"}
    config = scheduler_config(model, engine_options(artifact.recipe, given), artifact.recipe.target)
    return make_engine(model, config, None, None, None, CostModel())


def loss(
    dense: Executable, other: Executable, texts: Texts, tokens: int, prompts: Sequence[int]
) -> dict[str, float]:
    """KL divergences in nats, the share of equal first choices, and the density."""
    last, mean, most, same = list[float](), list[float](), 0.0, list[float]()
    read = seen = 0
    for number in prompts:
        ids = texts.prompt(tokens, number)
        expected, before = logprobs(dense, ids, LAST), sparse_tiles()
        found, after = logprobs(other, ids, LAST), sparse_tiles()
        read, seen = read + after[0] - before[0], seen + after[1] - before[1]
        divergence = kl(expected, found)
        last.append(float(divergence[-1]))
        mean.append(float(divergence.mean()))
        most = max(most, last[-1])
        same.append(float((expected.argmax(-1) == found.argmax(-1)).float().mean()))
    return {
        "kl_last": statistics.mean(last),
        "kl_last_most": most,
        "kl_last_64": statistics.mean(mean),
        "top1_last_64": statistics.mean(same),
        "density": read / seen if seen else 1.0,
    }


def ttft(base: Engine, other: Engine, texts: Texts, tokens: int, rounds: int) -> dict[str, float]:
    """Ratios of the TTFT of prompts of ``tokens`` tokens."""
    one = SamplingParams(max_tokens=1, temperature=0.0)
    pairs = in_turn(
        lambda number: base.generate([texts.prompt(tokens, number)], one),
        lambda number: other.generate([texts.prompt(tokens, number)], one),
        rounds,
    )
    return ratios(pairs) | {"load": load_average()}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = command_line("bench.long sparse_prefill", __doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[512, 1024, 4096, 8192], help="lengths of prompts"
    )
    parser.add_argument(
        "--cover", type=float, nargs="+", default=[0.95], help="shares of the attention to read"
    )
    parser.add_argument("--rounds", type=int, default=3, help="pairs of prefills of each length; 0: none")
    parser.add_argument("--prompts", type=int, default=4, help="for the loss; 0: none")
    parser.add_argument("--threads", type=int, default=0, help="0: as torch has them")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    artifact = Artifact.open(args.artifact)
    target = present_target(artifact.recipe.target)
    shared, missed = SharedWeights(), list[str]()
    dense = artifact.executable(shared=shared)
    texts = Texts(args.artifact)
    for cover in args.cover:
        other = artifact.executable(
            shared=shared, change=lambda graph, cover=cover: sparse(graph, cover, target)
        )
        engines = engine_of(artifact, dense), engine_of(artifact, other)
        for asked in args.tokens:
            tokens = min(asked, dense.max_model_len - MARGIN)
            result: dict[str, float] = {"tokens": tokens, "cover": cover}
            if args.prompts:
                result |= loss(dense, other, texts, tokens, range(100, 100 + args.prompts))
            if args.rounds:
                result |= ttft(*engines, texts, tokens, args.rounds)
            most = {"kl_last": MOST_KL} | ({"ratio": RATIOS[asked]} if asked in RATIOS else {})
            late = beyond(result, most)
            print_numbers(result, late, 16, ".4f", most)
            missed += late
    return 1 if missed else 0
