"""``python -m bench.coverage [TYPE ...]``: try model types, save the outcomes, and write the table of docs/models.md.

Without types every type is tried, in half an hour on a core. With types, the saved outcomes of other types stay.
``--table`` tries no type and writes the table again. Exit code 1: a graph computed other logits than the model.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.coverage import table
from bench.coverage.children import outcome_of
from bench.coverage.models import model_types
from bench.coverage.trial import WRONG
from optkit.bench.environment import environment

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "bench" / "results" / "coverage.json"
DOCUMENT = ROOT / "docs" / "models.md"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.coverage", description="Try model types.")
    parser.add_argument("types", nargs="*", metavar="TYPE", help="a model_type (default: all)")
    parser.add_argument("--save-result", type=Path, default=RESULT, metavar="FILE")
    parser.add_argument("--table", action="store_true", help="try nothing, write the table of docs/models.md")
    args = parser.parse_args(arguments)
    known = model_types()
    if unknown := sorted(set(args.types) - set(known)):
        parser.error(f"no causal LM type of transformers: {', '.join(unknown)}")
    result = saved(args.save_result) if args.types or args.table else {"types": {}}
    if not args.table:
        conditions = {**environment(), "command": ["python", "-m", "bench.coverage", *args.types]}
        for name in args.types or known:
            result["types"][name] = tried(name)
            save(args.save_result, {"environment": conditions, "types": result["types"]})
    if args.save_result == RESULT:
        table.write(DOCUMENT, table.table(result["types"], tested(), known))
    return int(any(outcome["state"] == WRONG for outcome in result["types"].values()))


def tried(name: str) -> dict[str, Any]:
    outcome = outcome_of(name)
    times = f"{outcome.capture_seconds:5.1f} {outcome.seconds:5.1f}"
    print(f"{name:28} {outcome.state:8} {times} {outcome.reason}", flush=True)
    return {**outcome.as_dict(), "time": datetime.now(UTC).isoformat(timespec="minutes")}


def tested() -> set[str]:
    """The types captured by the test suite."""
    from tests.support.architectures import OWN_ATTENTION, RECURRENT, SPECIFIC

    return set(SPECIFIC) | set(OWN_ATTENTION) | set(RECURRENT)


def saved(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.exists() else {"types": {}}


def save(path: Path, result: dict[str, Any]) -> None:
    ordered = {**result, "types": dict(sorted(result["types"].items()))}
    path.write_text(json.dumps(ordered, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
