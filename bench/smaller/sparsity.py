"""2:4 sparsity by magnitude, by Wanda and by SparseGPT: loss of quality and time.

python -m bench.smaller sparsity smollm2-135m
"""

from __future__ import annotations

from bench.smaller import _tries as tries

METHODS = ("magnitude", "wanda", "sparsegpt")


def main(arguments: list[str]) -> int:
    parser = tries.parser("sparsity", __doc__)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--samples", type=int, default=32, help="windows of 512 tokens of calibration text")
    parser.add_argument("--ignore", nargs="*", default=[], help="layers that stay dense")
    given = parser.parse_args(arguments)
    common = {"calibration": {"samples": given.samples}, "ignore": given.ignore}
    tries.run(given, {method: {"prune_2_4": {"method": method, **common}} for method in given.methods})
    return 0
