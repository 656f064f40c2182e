"""Bytes of a sequence's state in a running engine, for each kind of state, against the formulas of docs/sizes.md.

    python -m bench.models state_bytes
    python -m bench.models state_bytes --only windows --tokens 8192

Random models, a kind each. All pools of an engine are filled with a byte, a request is served, and the changed bytes
are counted; a second engine with another byte finds bytes equal to the first fill by chance. The formula is computed
from the configuration of transformers, not from optkit's records of states.

Layers with windows write the same blocks again and again, so the count there is the blocks held by the request
after its prompt, times the bytes of a block in memory; full KV is the same model in an engine without groups of layers.
The prompt is then served from a pool of a quarter of the bytes of full KV, and must get the same answer.

Exit code 1: bytes differ from the formula, windows hold more than a quarter of full KV, or answers differ.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.figures import command_line
from bench.models.kinds import KINDS, WINDOWS, Kind
from bench.models.random_model import (
    answer_of,
    captured,
    changed,
    engine_of,
    executable,
    random_prompts,
    start,
)
from optkit.bench.environment import environment
from optkit.graph.kv_layout import KVLayout, one_group
from optkit.lowering.lower import Executable
from optkit.machine.present import present_target
from optkit.runtime.engine import Engine

MOST_SHARE = 0.25
FILLS = (0x11, 0x22)  # as floats tiny numbers, so a kernel that loads masked rows computes nothing odd
PROMPT_TOKENS, ANSWER_TOKENS = 61, 6
BLOCK, STEP_TOKENS, WINDOW_ANSWER = 32, 128, 8


def main(arguments: Sequence[str]) -> int:
    parser = command_line("bench.models state_bytes", __doc__)
    parser.add_argument("--only", choices=[*KINDS, "windows"], action="append", help="may be repeated")
    parser.add_argument("--tokens", type=int, default=8192, help="of the prompt for windows")
    parser.add_argument("--save-result", type=Path)
    args = parser.parse_args(arguments)
    before, rows, ok = environment(), dict[str, Any](), True
    for name in args.only or [*KINDS, "windows"]:
        rows[name] = windowed(WINDOWS, args.tokens) if name == "windows" else written(KINDS[name])
        ok &= show(name, rows[name])
    if args.save_result:
        content = {"kind": "state_bytes", "environment": before, "kinds": rows}
        args.save_result.write_text(json.dumps(content, indent=1) + "\n")
    return int(not ok)


def model_of(kind: Kind) -> Executable:
    graph = captured(kind.model_type, kind.fields)
    return executable(changed(graph, kind.passes, present_target("cpu")))


# -- bytes that change -------------------------------------------------------------------------------------


def written(kind: Kind) -> dict[str, Any]:
    """Bytes written by a sequence, and bytes by the formula, of tokens and of the sequence."""
    model = model_of(kind)
    (prompt,) = random_prompts(1, PROMPT_TOKENS, model.vocab_size)
    found = [changed_bytes(model, prompt, fill) for fill in FILLS]
    counted = {name: int((found[0][name] | found[1][name]).sum()) for name in found[0]}
    tokens = PROMPT_TOKENS + ANSWER_TOKENS - 1  # the last token is not computed
    return {
        "model_type": kind.model_type,
        "tokens": tokens,
        "KV": counted["KV"],
        "KV by formula": tokens * kind.token_bytes,
        "states": counted["states"],
        "states by formula": kind.sequence_bytes,
    }


def changed_bytes(model: Executable, prompt: Sequence[int], fill: int) -> dict[str, Tensor]:
    """True for each byte of the pools other than ``fill`` after a request."""
    engine = engine_of(model, max_num_seqs=2, kv_cache_bytes=32 << 20, enable_prefix_caching=False)
    pools = pools_of(engine)
    for memory in pools.values():
        for each in memory:
            each.fill_(fill)
    answer_of(engine, prompt, ANSWER_TOKENS)
    nothing = torch.zeros(0, dtype=torch.bool)
    return {name: torch.cat([nothing, *(each != fill for each in memory)]) for name, memory in pools.items()}


def pools_of(engine: Engine) -> dict[str, list[Tensor]]:
    """The memory of KV and of recurrent states as bytes, shared memory once."""
    runner: Any = engine.runner
    memory = {"KV": sum(runner.pools.buffers, ()), "states": runner.state_pools.values()}
    return {
        name: [torch.from_numpy(each.reshape(-1).view(np.uint8)) for each in pools]
        for name, pools in memory.items()
    }


# -- windows -----------------------------------------------------------------------------------------------


def windowed(kind: Kind, length: int, step_tokens: int = STEP_TOKENS) -> dict[str, Any]:
    """Bytes held by a prompt of ``length`` tokens with windows, without, and by formula; and the three answers.

    ``step_tokens`` are computed in a step; so many tokens are held beside the window.
    """
    model = model_of(kind)
    (prompt,) = random_prompts(1, length, model.vocab_size)
    most = 4 * length * kind.token_bytes
    held = held_bytes(model, prompt, most, None, step_tokens)
    full = held_bytes(model, prompt, most, one_group(model.states), step_tokens)
    quarter = int(MOST_SHARE * full["bytes"])
    scarce = held_bytes(model, prompt, quarter, None, step_tokens)
    return {
        "model_type": kind.model_type,
        "tokens": held["tokens"],
        "held": held["bytes"],
        "held by formula": by_formula(kind, held["tokens"]),
        "full": full["bytes"],
        "full by formula": -(-held["tokens"] // BLOCK) * BLOCK * kind.token_bytes,
        "share": held["bytes"] / full["bytes"],
        "pool of a quarter": scarce["pool"],
        "equal answers": held["answer"] == full["answer"] == scarce["answer"],
    }


def held_bytes(
    model: Executable, prompt: Sequence[int], num_bytes: int, layout: KVLayout | None, step_tokens: int
) -> dict[str, Any]:
    """Bytes of the blocks held after the prompt, computed tokens, the answer, and the bytes of the pool."""
    engine = engine_of(
        model, layout, kv_cache_bytes=num_bytes, block_size=BLOCK, max_num_batched_tokens=step_tokens,
        max_model_len=len(prompt) + WINDOW_ANSWER, enable_prefix_caching=False, max_num_seqs=2,
    )  # fmt: skip
    memory = pools_of(engine)["KV"]
    pool = sum(map(len, memory))
    rows = engine.config.num_blocks + int(any(engine.config.kv_windows))  # and the null block
    start(engine, prompt, WINDOW_ANSWER)
    answer: list[int] = []
    while len(answer) < 2:
        answer += [token for output in engine.step() for token in output.token_ids]
    (request,) = engine.scheduler.running
    blocks = sum(block >= 0 for table in request.block_tables for block in table)
    tokens = request.num_computed
    while engine.has_work:
        answer += [token for output in engine.step() for token in output.token_ids]
    return {"bytes": blocks * pool // rows, "tokens": tokens, "answer": answer, "pool": pool}


def by_formula(kind: Kind, tokens: int) -> int:
    """The bytes held by the layers of ``kind`` after ``tokens`` tokens, in whole blocks."""
    blocks = -(-tokens // BLOCK)
    layer = kind.token_bytes // len(kind.windows) * BLOCK
    return sum(layer * (blocks - (max(0, tokens - w + 1) // BLOCK if w else 0)) for w in kind.windows)


# -- the report --------------------------------------------------------------------------------------------


def show(name: str, row: dict[str, Any]) -> bool:
    """Print the row of a kind; False where a bound is missed."""
    if "share" not in row:
        ok = row["KV"] == row["KV by formula"] and row["states"] == row["states by formula"]
        print(
            f"{name} ({row['model_type']}), {row['tokens']} tokens: KV {row['KV']:,} bytes, by formula "
            f"{row['KV by formula']:,}; states {row['states']:,}, by formula {row['states by formula']:,}"
            f"{'   MISSED' * (not ok)}",
            flush=True,
        )
        return ok
    equal = row["held"] == row["held by formula"] and row["full"] == row["full by formula"]
    ok = equal and row["share"] <= MOST_SHARE and row["equal answers"]
    print(
        f"{name} ({row['model_type']}), {row['tokens']} tokens: {row['held']:,} bytes held, by formula "
        f"{row['held by formula']:,}; without windows {row['full']:,}, by formula {row['full by formula']:,}: "
        f"{row['share']:.3f} (at most {MOST_SHARE}); answers from a pool of {row['pool of a quarter']:,} bytes "
        f"{'equal' if row['equal answers'] else 'differ'}{'   MISSED' * (not ok)}",
        flush=True,
    )
    return ok


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
