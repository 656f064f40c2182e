"""Decoder layers removed by their influence: loss of quality for each number of layers, beside a cut of channels.

python -m bench.smaller layers smollm2-135m --counts 1 2 3
"""

from __future__ import annotations

from typing import Any

from bench.smaller import _tries as tries


def main(arguments: list[str]) -> int:
    parser = tries.parser("layers", __doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2], help="layers to remove")
    given = parser.parse_args(arguments)
    wanted: dict[str, dict[str, Any]] = {
        f"{count} layers less": {"drop_layers": {"count": count}} for count in given.counts
    }
    for name, row in tries.run(given, wanted).items():
        print(f"{name}: removed {row['stats']['removed']}")
    return 0
