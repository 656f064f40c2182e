"""Prefix hits of recurrent models: TTFT from a checkpoint of the state against an empty cache; equal answers.

    python -m bench.models prefix_hit
    python -m bench.models prefix_hit --model bamba --prompt-tokens 1500 --rounds 9

Random models of a few layers. In each round a new prompt is answered three times: from an empty cache (cold), again
(the hit ends at the last full block of the prompt), and as the next turn of a chat, which is prompt, answer and new
words (the hit ends in the answer). The next turn is then answered from an empty cache, too. Answers are greedy.
Answers from a hit must equal answers from an empty cache, and in the first round the tokens of transformers in eager
attention. Ratios are taken within a round, of wall time and of the time of the main thread.

Exit code 1: a median ratio is above the bound, an answer differs, or a prompt found no checkpoint.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.figures import command_line
from bench.models.random_model import (
    Timed,
    answer_of,
    captured,
    changed,
    eager_answer,
    engine_of,
    executable,
    random_prompts,
)
from optkit.bench.environment import environment
from optkit.graph.states import recurrent_of
from optkit.machine.load import load_average
from optkit.machine.present import present_target
from optkit.runtime.engine import Engine

MOST_RATIO = 0.15
ANSWER_TOKENS = 32
NEW_TOKENS = 30  # of the next turn
PASSES: dict[str, dict[str, Any]] = {
    "fuse_add_rms_norm": {},
    "select_logits_rows": {},
    "flash_attention": {},
}
COMMON = {
    "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
LINEAR, FULL = "linear_attention", "full_attention"
MODELS: dict[str, dict[str, Any]] = {
    "bamba": {
        **COMMON, "num_hidden_layers": 6, "attn_layer_indices": [3], "mamba_n_heads": 16, "mamba_d_head": 64,
        "mamba_d_state": 64, "mamba_n_groups": 1, "mamba_expand": 2,
    },
    "mamba": {
        "vocab_size": 4096, "hidden_size": 512, "num_hidden_layers": 6, "state_size": 16, "time_step_rank": 32,
    },
    "lfm2": {**COMMON, "num_hidden_layers": 6, "layer_types": ["conv", "conv", FULL] * 2},
    "qwen3_next": {
        **COMMON, "num_hidden_layers": 4, "layer_types": [LINEAR, LINEAR, LINEAR, FULL], "head_dim": 64,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
        "linear_value_head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    parser = command_line("bench.models prefix_hit", __doc__)
    parser.add_argument(
        "--model", choices=list(MODELS), action="append", help="may be repeated; default: all"
    )
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--save-result", type=Path)
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    before, rows = environment(), {}
    for name in args.model or MODELS:
        rows[name] = figure(name, MODELS[name], args.prompt_tokens, args.rounds)
        show(name, rows[name])
    print(f"{args.threads} threads, load average {before['load_average']:.1f} to {load_average():.1f}")
    if args.save_result:
        content = {"kind": "prefix_hit", "environment": before, "load_average_after": load_average()}
        args.save_result.write_text(json.dumps(content | {"models": rows}, indent=1) + "\n")
    return int(any(missed(row) for row in rows.values()))


def figure(model_type: str, fields: dict[str, Any], length: int, rounds: int) -> dict[str, Any]:
    """The times in seconds, ratios and counts of a model of ``model_type``."""
    graph = captured(model_type, fields)
    model = executable(changed(graph, PASSES, present_target("cpu")))
    if not recurrent_of(model.states):
        raise ValueError(f"{model_type} has no recurrent state")
    engine = engine_of(model, max_num_seqs=2, kv_cache_bytes=256 << 20, max_model_len=length + 256)
    prompts = random_prompts(rounds + 1, length, model.vocab_size)
    round_of(engine, prompts[-1])  # warm up
    found = [round_of(engine, prompt) for prompt in prompts[:-1]]
    eager = eager_answer(model_type, fields, prompts[0], ANSWER_TOKENS)
    row: dict[str, Any] = {
        "prompt_tokens": length,
        "rounds": rounds,
        "times": [one["times"] for one in found],
    }
    for clock in ("wall", "cpu"):
        for kind, cold in (("again", "cold"), ("next turn", "next turn, cold")):
            ratios = [one["times"][kind][clock] / one["times"][cold][clock] for one in found]
            row[f"{kind}, {clock}"] = statistics.median(ratios)
            row[f"{kind}, {clock}, worst"] = max(ratios)
    row["least cached"] = min(min(one["cached"]) for one in found)
    row["answers that differ"] = sum(one["differ"] for one in found)
    row["differs from transformers"] = found[0]["answer"] != eager
    return row


def round_of(engine: Engine, prompt: list[int]) -> dict[str, Any]:
    """Times by kind, tokens found in the cache, and differing answers."""
    engine.reset_prefix_cache()
    cold = answer_of(engine, prompt, ANSWER_TOKENS)
    again = answer_of(engine, prompt, ANSWER_TOKENS)
    engine.reset_prefix_cache()
    answer_of(engine, prompt, ANSWER_TOKENS)
    turn = [*prompt, *cold.tokens, *prompt[:NEW_TOKENS]]
    hit = answer_of(engine, turn, ANSWER_TOKENS)
    engine.reset_prefix_cache()
    cold_turn = answer_of(engine, turn, ANSWER_TOKENS)
    kinds: dict[str, Timed] = {"cold": cold, "again": again, "next turn": hit, "next turn, cold": cold_turn}
    if cold.cached or cold_turn.cached:
        raise RuntimeError("a cache that was emptied has tokens")
    return {
        "times": {kind: {"wall": one.wall, "cpu": one.cpu} for kind, one in kinds.items()},
        "cached": [again.cached, hit.cached],
        "answer": cold.tokens,
        "differ": (again.tokens != cold.tokens) + (hit.tokens != cold_turn.tokens),
    }


def missed(row: dict[str, Any]) -> list[str]:
    """The names of the results beyond their bounds."""
    names = ("again, wall", "next turn, wall")
    late = [name for name in names if not row[name] <= MOST_RATIO]
    wrong = [name for name in ("answers that differ", "differs from transformers") if row[name]]
    return late + wrong + ["least cached"] * (row["least cached"] == 0)


def show(name: str, row: dict[str, Any]) -> None:
    """Print the figures of a model."""
    cold, again = (statistics.median(one[kind]["wall"] for one in row["times"]) for kind in ("cold", "again"))
    print(
        f"{name}: {row['prompt_tokens']} tokens, cold {1e3 * cold:.1f} ms, again {1e3 * again:.1f} ms; "
        f"at least {row['least cached']} tokens found"
    )
    for kind in ("again", "next turn"):
        print(
            f"  {kind:10} ratio {row[f'{kind}, wall']:.3f} (worst {row[f'{kind}, wall, worst']:.3f}), of the "
            f"thread's time {row[f'{kind}, cpu']:.3f}; at most {MOST_RATIO}"
        )
    print(
        f"  answers that differ from those of an empty cache: {row['answers that differ']}; "
        f"from transformers: {int(row['differs from transformers'])}"
        f"{'; MISSED ' * bool(missed(row))}{', '.join(missed(row))}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
