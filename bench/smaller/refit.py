"""Cut feed-forward channels with and without refit: loss of quality, and the time of the pass.

    python -m bench.smaller refit smollm2-135m
    python -m bench.smaller refit smollm2-135m --ffn 0.2 --damping 0.3 --samples 32

The importance of channels and the refit read calibration text, the loss is measured on other text. Exit code 1: the
refit takes longer than a minute, or leaves more than 0.6 of the loss.
"""

from __future__ import annotations

from bench.bounds import beyond, print_numbers
from bench.smaller import _tries as tries

MOST = {"seconds of the refit": 60.0, "KL with refit over KL without": 0.6}


def main(arguments: list[str]) -> int:
    parser = tries.parser("refit", __doc__)
    parser.add_argument("--ffn", type=float, default=0.1, help="share of channels to remove")
    parser.add_argument("--damping", type=float, help="of the refit; by default the pass's own")
    parser.add_argument("--samples", type=int, default=16, help="windows of 512 tokens of calibration text")
    given = parser.parse_args(arguments)
    cut = {"ffn": given.ffn, "calibration": {"samples": given.samples}}
    damping = {} if given.damping is None else {"damping": given.damping}
    found = tries.run(
        given,
        {"cut": {"prune_ffn": cut}, "cut and refitted": {"prune_ffn": {**cut, **damping, "refit": True}}},
    )
    plain, refitted = found.values()
    result = {
        "seconds of the refit": refitted["seconds"],
        "KL with refit over KL without": refitted["kl_mean"] / plain["kl_mean"],
    }
    missed = beyond(result, MOST)
    print_numbers(result, missed, 32, ".3f", MOST)
    return 1 if missed else 0
