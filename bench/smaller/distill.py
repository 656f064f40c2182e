"""A cut model, refitted, then trained by its source: what is left of the loss, on text that nothing was fitted to.

    python -m bench.smaller distill smollm2-135m --minutes 30

The last line has the divergence after training over that of the refit alone. Exit code 1: more than 0.7, or fewer
tokens agree.
"""

from __future__ import annotations

from bench.bounds import beyond, print_numbers
from bench.smaller import _tries as tries

MOST = {"KL with distill over KL of refit alone": 0.7}
LEAST = {"top-1 gained": 0.0}


def main(arguments: list[str]) -> int:
    parser = tries.parser("distill", __doc__)
    parser.add_argument("--ffn", type=float, default=0.1, help="share of channels to remove")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, help="learning rate; by default the pass's own")
    parser.add_argument("--rank", type=int, help="of the adapters; by default the pass's own")
    given = parser.parse_args(arguments)
    cut = {"prune_ffn": {"ffn": given.ffn, "refit": True}}
    options = {key: getattr(given, key) for key in ("minutes", "rate", "rank")}
    chosen = {key: value for key, value in options.items() if value is not None}
    found = tries.run(given, {"refitted": cut, "refitted and distilled": {**cut, "distill": chosen}})
    refitted, distilled = found.values()
    stats = distilled["stats"]
    print(f"{stats['steps']} steps in {stats['seconds']:.0f} s, undone: {stats['undone']}")
    result = {
        "KL with distill over KL of refit alone": distilled["kl_mean"] / refitted["kl_mean"],
        "top-1 gained": distilled["top1"] - refitted["top1"],
    }
    missed = beyond(result, MOST, LEAST)
    print_numbers(result, missed, 40, ".4f", MOST)
    return 1 if missed else 0
