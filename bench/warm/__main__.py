"""Time to first token with the prompt computed before: baked into the artifact, or while it is typed.

    python -m bench.warm baked/ --without plain/     # the same recipe with bake_prefix and without
    python -m bench.warm plain/ --only typing        # any artifact with a chat template

``baked``: servers are started in turn, with the artifact of each kind; the first request after the start is the baked
system prompt and a question. Compared are its time to first token, the bytes of the answer, the time from start to
ready, and the bytes of the artifacts. ``typing``: a message is sent to ``/v1/cache/warm`` word by word at the pace of a
writer, then sent as a request, beside clients that stream answers; the same message without the calls before is the
other side. Sides alternate, so a slow phase of the machine slows both.

Prints a table. ``--save-result`` writes a JSON with every measurement, the command and the environment. Exit code 1: a
bound is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.warm import baked, typing_ahead
from optkit.bench.environment import environment
from optkit.errors import UserError

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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.warm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--without", type=Path, help="the artifact without bake_prefix, for the part baked")
    parser.add_argument("--prompt", type=Path, help="the baked system prompt, for the part baked")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; may be repeated")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=1900, help="of the typed message")
    parser.add_argument("--pace", type=float, default=8.0, help="tokens typed in a second")
    parser.add_argument("--clients", type=int, default=2, help="other clients, which stream answers")
    parser.add_argument("--save-result", type=Path)
    args = parser.parse_args(argv)
    parts = args.only or PARTS
    result: dict[str, Any] = {}
    if "baked" in parts:
        if args.without is None or args.prompt is None:
            parser.error("the part baked needs --without and --prompt")
        result |= baked.run(args.artifact, args.without, args.prompt, args.rounds)
    if "typing" in parts:
        result |= typing_ahead.run(args.artifact, args.rounds, args.tokens, args.pace, args.clients)
    missed = missed_bounds(result)
    for name, value in result.items():
        if isinstance(value, int | float):
            print(f"{name:38} {value:14.3f}{'   MISSED' * (name in missed)}")
    if args.save_result:
        content = {"kind": "warm", "environment": environment(), "missed": missed, **result}
        args.save_result.write_text(json.dumps(content) + "\n")
    return 1 if missed else 0


def missed_bounds(result: dict[str, Any]) -> list[str]:
    """The names of the results beyond their bounds."""
    return [name for name, bound in MOST.items() if name in result and not result[name] <= bound]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(str(error))
