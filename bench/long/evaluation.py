"""Long evaluation: tasks with signal, and damage that is visible in answers and not in perplexity.

    python -m bench.long evaluation --artifact artifact/
    python -m bench.long evaluation --artifact artifact/ --lengths 1024,4096,8192 --documents 2

The artifact is compared with the same artifact (the loss must be 0), and with the artifact without the KV between the
first block and the last tokens (``bench.long.evicting``), as in an engine without distant text. Perplexity is measured
on windows of text of the length of ``optkit eval`` and of 4,096 tokens. Exit code 1: the same artifact has a loss, or
the loss by forgetting is below ``LEAST_LOSS``, or forgetting moves the logarithm of perplexity by more than
``MOST_PERPLEXITY``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.figures import command_line
from bench.long.evicting import EvictingLogits
from optkit.artifact.open import Artifact
from optkit.bench.environment import environment
from optkit.evaluation.long.score import KeptAnswers, LongReport, score_long
from optkit.evaluation.long.sources import RuntimeAnswers
from optkit.evaluation.long.tasks import documents
from optkit.evaluation.quality import compare_many, evaluation_windows
from optkit.runtime.logits import RuntimeLogits
from optkit.text.load import load_tokenizer

LEAST_LOSS = 0.5  # nats a token, of a model that has forgotten most of the document
MOST_PERPLEXITY = 0.05  # of the logarithm
TEXT_WINDOWS = ((512, 8), (4096, 2))  # tokens, count


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line("bench.long evaluation", __doc__)
    parser.add_argument("--artifact", type=Path, default=Path("artifact"))
    parser.add_argument("--lengths", default="1024,2048,4096", help="tokens (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=1, help="of each task and length")
    parser.add_argument("--window", type=int, default=512, help="tokens (default: %(default)s)")
    parser.add_argument("--save-result", type=Path)
    args = parser.parse_args(argv)
    tokenizer = load_tokenizer(str(args.artifact))
    docs = documents(tokenizer, [int(length) for length in args.lengths.split(",")], count=args.documents)
    whole = RuntimeLogits(Artifact.open(args.artifact).executable())
    kept = KeptAnswers(lambda: RuntimeAnswers(whole))
    started = time.perf_counter()
    same = score_long(RuntimeAnswers(whole), docs, kept)
    seconds = time.perf_counter() - started
    show("the artifact against itself", same)
    cut = EvictingLogits(whole.model, args.window)
    damaged = score_long(RuntimeAnswers(cut), docs, kept)
    show(f"the first block and the last {args.window} tokens", damaged)
    ratios = {
        length: perplexity_ratio(whole, cut, tokenizer, length, count) for length, count in TEXT_WINDOWS
    }
    for length, ratio in ratios.items():
        print(f"ln perplexity ratio in windows of {length}: {ratio['value']:.4f} ± {ratio['stderr']:.4f}")
    print(f"{seconds:.0f} s for {2 * same.tokens:,} tokens of documents")
    missed = faults(same, damaged, max(abs(ratio["value"]) for ratio in ratios.values()))
    if args.save_result:
        result = {
            "kind": "long-evaluation",
            "environment": environment(),
            "same": same.to_dict(),
            "damaged": damaged.to_dict(),
            "ln_ppl_ratio": ratios,
            "missed": missed,
        }
        args.save_result.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(f"MISSED {line}" for line in missed) or "done")
    return 1 if missed else 0


def perplexity_ratio(
    whole: RuntimeLogits, cut: EvictingLogits, tokenizer: Any, length: int, count: int
) -> dict[str, float]:
    """The mean of ln(perplexity cut / whole) on ``count`` windows of ``length`` tokens, with its standard error."""
    windows = evaluation_windows(tokenizer, count * length, length)
    report = compare_many(whole, {"cut": cut}, windows)["cut"]
    return {"value": report.ln_ppl_ratio.value, "stderr": report.ln_ppl_ratio.stderr}


def faults(same: LongReport, damaged: LongReport, ln_ppl_ratio: float) -> list[str]:
    """The missed conditions of an instrument."""
    found = []
    if same.loss is None or damaged.loss is None:
        return ["no task carries a signal"]
    if same.loss.value != 0 or (same.kl and same.kl.value > 1e-9):
        found.append(f"the artifact differs from itself by {same.loss.value:.3g} nats")
    if damaged.loss.value < LEAST_LOSS:
        found.append(f"the loss by forgetting is {damaged.loss.value:.3g}, below {LEAST_LOSS:g}")
    if ln_ppl_ratio > MOST_PERPLEXITY:
        found.append(f"forgetting moves the logarithm of perplexity by {ln_ppl_ratio:.3g}")
    return found


def show(title: str, report: LongReport) -> None:
    """Print a row a task and length."""
    print(title)
    print(
        f"  {'task':16} {'tokens':>6} {'answers':>7} {'log p':>7} {'gain':>6} {'exact':>5} {'loss':>7} signal"
    )
    for task in report.tasks:
        score = task.score
        loss = score.loss.value if score.loss else 0.0
        print(
            f"  {task.task:16} {task.length:6} {score.questions:7} {score.logprob.value:7.2f} {score.gain.value:6.2f} "
            f"{score.exact:5.0%} {loss:7.3f} {'yes' if task.signal else 'no'}"
        )
    if report.loss:
        print(f"  loss {report.loss.value:.3f} ± {report.loss.stderr:.3f} nats an answer token")
    for name, depth in report.by_depth.items():
        if depth.loss:
            print(f"  depth {name:12} loss {depth.loss.value:.3f}, exact {depth.exact:.0%}")
    print(flush=True)
