"""The exact response cache over HTTP, on a server of the artifact.

    python -m bench.response_cache artifact/

Sends 100 requests together, then again for the hits, then in turn past the cache, and 100 requests with a different
field each. Prints a table. ``--save-result`` writes a JSON with every single time, the command and the environment.
Exit code 1: a bound is missed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.bounds import beyond, print_numbers
from bench.figures import command_line
from bench.response_cache import measure
from optkit.bench.environment import environment
from optkit.bench.servers import free_port, optkit_command, running

MOST = {
    "hit p50, ms": 3.0,
    "hits unlike fresh answers": 0,
    "hits across keys": 0,
    "not answered by the cache": 0,
}
SIZE = "64MiB"


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line("bench.response_cache", __doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--rounds", type=int, default=9, help="hits of each request")
    parser.add_argument("--save-result", type=Path)
    args = parser.parse_args(argv)
    port = free_port()
    command = [*optkit_command(args.artifact, port), "--response-cache", SIZE]
    with running(command, port) as url:
        result = measure.run(url, args.rounds)
    missed = missed_bounds(result)
    print_numbers(result, missed, 28, "10.3f")
    if args.save_result:
        content = {"kind": "response-cache", "environment": environment(), "missed": missed, **result}
        args.save_result.write_text(json.dumps(content) + "\n")
    return 1 if missed else 0


def missed_bounds(result: dict[str, object]) -> list[str]:
    """The names of the results beyond their bounds."""
    return beyond(result, MOST)


if __name__ == "__main__":
    sys.exit(main())
