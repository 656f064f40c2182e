"""``python -m bench.coverage [TYPE ...]``: try model types, save the outcomes, and write the table of docs/models.md."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from bench.coverage.children import outcome_of
from bench.coverage.models import model_types

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "bench" / "results" / "coverage.json"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.coverage", description=__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE")
    parser.add_argument("--save-result", type=Path, default=RESULT)
    args = parser.parse_args()
    outcomes = {}
    for name in args.types or model_types():
        outcome = outcome_of(name)
        outcomes[name] = outcome.as_dict()
        print(f"{name:28} {outcome.state:8} {outcome.capture_seconds:5.1f} {outcome.seconds:5.1f} {outcome.reason}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
