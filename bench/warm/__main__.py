"""Time to first token with a prompt computed before: baked into the artifact, or while typed.

    python -m bench.warm artifact/                    # any artifact with a chat template; about half an hour
    python -m bench.warm artifact/ --quick            # a smoke test: short prompts, few rounds
    python -m bench.warm artifact/ --baked baked/ --prompt system.txt    # an artifact made with bake_prefix

``baked``: a prompt is baked into a copy of the artifact by the last step of ``optkit optimize``, unless ``--baked``
names an artifact with the prompt. Servers of both are started in turn; the first request after the start is the
system prompt and a question. Compared are the time to first token, the bytes of the answer, the time from start to
ready, and the bytes of the artifacts. ``typing``: a message is sent to ``/v1/cache/warm`` word by word at the pace of a
writer, then sent as a request, while other clients stream answers; the same message without the calls before is the
other side. Sides alternate, so a slow phase of the machine slows both; figures are medians of the rounds.

Prints a table. ``--save-result`` writes a JSON with every measurement, the command, the environment and the load
average. Exit code 1: a bound is missed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.bounds import beyond, print_numbers
from bench.figures import command_line
from bench.warm import baked, typing_ahead
from optkit.bench.environment import environment
from optkit.errors import UserError
from optkit.machine.load import load_average

PARTS = ("baked", "typing")
MOST = {
    "baked: TTFT ratio": 0.10,
    "baked: start, ms more": 50.0,
    "baked: bytes beside the KV": 65536.0,  # token ids, headers, the record of the pass
    "baked: answers that differ": 0.0,
    "typing: TTFT ratio": 0.10,
    "typing: p95 ratio of other clients": 1.1,
    "typing: answers that differ": 0.0,
}
QUICK = {"rounds": 1, "messages": 1, "prompt_tokens": 300, "tokens": 300, "pace": 100.0, "clients": 1}


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line("bench.warm", __doc__)
    parser.add_argument("artifact", type=Path, help="an artifact without baked prompts")
    parser.add_argument("--baked", type=Path, help="the artifact of the same recipe with bake_prefix")
    parser.add_argument(
        "--prompt", type=Path, help="a file with the system prompt (default: a text of optkit)"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=1500, help="of the system prompt without --prompt"
    )
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; may be repeated")
    parser.add_argument("--rounds", type=int, default=7, help="starts of each server, in the part baked")
    parser.add_argument("--messages", type=int, default=3, help="typed messages")
    parser.add_argument("--tokens", type=int, default=1900, help="of a typed message")
    parser.add_argument("--pace", type=float, default=8.0, help="tokens typed in a second")
    parser.add_argument("--clients", type=int, default=2, help="other clients, which stream answers")
    parser.add_argument("--quick", action="store_true", help="a smoke test: its figures are not to be quoted")
    parser.add_argument("--save-result", type=Path)
    args = parser.parse_args(argv)
    if args.baked and not args.prompt:
        parser.error("--baked needs --prompt: the system prompt that it was made with")
    if args.quick:
        vars(args).update(QUICK)
    parts, before = args.only or PARTS, environment()
    result: dict[str, Any] = {}
    if "baked" in parts:
        with tempfile.TemporaryDirectory(prefix="optkit-warm-") as directory:
            pair = baked.prepare(args.artifact, args.baked, args.prompt, args.prompt_tokens, Path(directory))
            result |= baked.run(*pair, args.rounds)
    if "typing" in parts:
        result |= typing_ahead.run(args.artifact, args.messages, args.tokens, args.pace, args.clients)
    missed = missed_bounds(result)
    loads = {"load_average_before": before["load_average"], "load_average_after": load_average()}
    print_numbers(result, missed, 38, "14.3f", MOST)
    print(
        f"rounds {args.rounds}, messages {args.messages};",
        *(f"{key} {value}" for key, value in loads.items()),
    )
    if args.save_result:
        counts = {"rounds": args.rounds, "messages": args.messages, "quick": args.quick}
        content = {"kind": "warm", "environment": before, **counts, **loads, "missed": missed, **result}
        args.save_result.write_text(json.dumps(content) + "\n")
    return 1 if missed else 0


def missed_bounds(result: dict[str, Any]) -> list[str]:
    """The names of the results beyond their bounds."""
    return beyond(result, MOST)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(str(error))
