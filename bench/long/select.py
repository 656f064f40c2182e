"""Reading the KV blocks that matter: time a token, divergence and answers at 8,192 tokens, beside reading all blocks.

    python -m bench.long select artifact/ [--budget 1024] [--dense N] [--only quality,answers,speed]

The artifact's graph is lowered twice over the same weights, as it is and with the pass ``kv_select``. Windows of the
held-out text are prefilled once, and both models read the same keys and values.

- ``quality``: the last 256 of 8,192 tokens as generated tokens; KL of the next token's distribution and NLL against
  the full model.
- ``answers``: questions about documents of 8,192 tokens, as in ``optkit eval --long``: the loss of log-probability
  against the full model, a token. First as a server computes them, with the question in the prompt; then with a
  question of generated tokens (``asked``), so that the search for the evidence selects, too.
- ``speed``: decode steps of both models in turn at several lengths. The figure is the fastest of the rounds; thread CPU
  time is the second witness.

Exit code 1 where a bound is missed: TPOT at 8,192 at most 0.65x, below 2,048 at most 1.01x; KL at most 0.01 nats;
answers within 0.05 nats.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bench.bounds import beyond, print_numbers
from optkit.artifact.open import Artifact
from optkit.evaluation.long.document import Document
from optkit.evaluation.long.score import KeptAnswers, score_long
from optkit.evaluation.long.sources import Answered, RuntimeAnswers
from optkit.evaluation.long.tasks import documents
from optkit.graph.ir import Graph
from optkit.graph.states import PROMPT_LENS, named_pools
from optkit.graph.variants import SharedWeights
from optkit.graph.verify import verify
from optkit.lowering.lower import Executable
from optkit.machine.present import present_target
from optkit.passes.base import PassContext
from optkit.passes.kv_select import KVSelect, KVSelectConfig
from optkit.runtime.logits import RuntimeLogits
from optkit.text.corpora import load_text
from optkit.text.load import load_tokenizer

BLOCK, CHUNK = 32, 1024
LONG, SHORT = 8192, (512, 1024, 1536, 2040)  # contexts
GENERATED = 256  # tokens of a window
MOST = {"tpot_8192": 0.65, "kl": 0.01, "answer_nats": 0.05, "asked_nats": 0.05} | {
    f"tpot_{n}": 1.01 for n in SHORT
}


class Model:
    """An executable over pools of a single sequence in order, whose first ``filled`` tokens are computed."""

    def __init__(self, executable: Executable, pools: dict[str, Tensor]) -> None:
        self.executable, self.pools = executable, pools

    def logits(self, ids: Sequence[int], start: int, stop: int, prompt: int, rows: int) -> Tensor:
        """Logits of the last ``rows`` tokens of a step from ``start`` to ``stop`` after a prompt of so many tokens."""
        int32 = {"dtype": torch.int32}
        return self.executable(
            self.pools
            | {
                "input_ids": torch.tensor(ids[start:stop]),
                "positions": torch.arange(start, stop),
                "slot_mapping": torch.arange(start, stop),
                "query_start": torch.tensor([0, stop - start], **int32),
                "seq_lens": torch.tensor([stop], **int32),
                "block_tables": torch.arange(-(-stop // BLOCK), **int32)[None],
                "logits_index": torch.arange(stop - start - rows, stop - start),
                PROMPT_LENS: torch.tensor([prompt], **int32),
            }
        )

    def fill(self, ids: Sequence[int], stop: int) -> None:
        """Compute the first ``stop`` tokens as a prompt."""
        for start in range(0, stop, CHUNK):
            end = min(start + CHUNK, stop)
            self.logits(ids, start, end, stop, 1)


def models(arguments: argparse.Namespace) -> tuple[Model, Model]:
    """The full model and the selecting model, over the same weights and pools."""
    artifact, shared = Artifact.open(arguments.artifact, verify=False), SharedWeights()
    context = PassContext(present_target(artifact.recipe.target))

    def selecting(graph: Graph) -> Graph:
        config = KVSelectConfig(
            budget=arguments.budget, min_context=arguments.min_context, dense=arguments.dense
        )
        optimization = KVSelect(config)
        plan = optimization.check(graph, context)
        if not plan.sites:
            raise SystemExit(f"no layer selects: {plan.skips[-1].reason if plan.skips else 'no attention'}")
        result = optimization.apply(graph, plan, context)
        verify(graph)
        print(f"{result.changed} layers select; {result.stats}")
        return graph

    full = artifact.executable(shared=shared)
    some = artifact.executable(shared=shared, change=selecting)
    pools = named_pools(some.states, LONG // BLOCK, BLOCK, 1)
    return Model(full, pools), Model(some, pools)


def windows(ids: Sequence[int], count: int) -> Iterator[list[int]]:
    """Windows of ``LONG`` tokens, evenly spread."""
    step = (len(ids) - LONG) // max(1, count - 1)
    for number in range(count):
        yield list(ids[number * step : number * step + LONG])


def quality(full: Model, some: Model, ids: Sequence[int], count: int) -> dict[str, float]:
    """KL and NLL of generated tokens, with the selecting model's own KV, as in decode."""
    divergences, losses = [], []
    start = LONG - GENERATED
    for window in windows(ids, count):
        some.fill(window, start)
        expected = full.logits(window, start, LONG, start, GENERATED).log_softmax(-1)
        found = some.logits(window, start, LONG, start, GENERATED).log_softmax(-1)
        divergences.append((expected.exp() * (expected - found)).sum(-1))
        targets = torch.tensor(window[start + 1 :])[:, None]
        losses.append((expected[:-1].gather(1, targets) - found[:-1].gather(1, targets)).mean())
        print(f"  window: KL {divergences[-1].mean():.5f}, NLL {losses[-1]:+.4f}", flush=True)
    values = torch.cat(divergences)
    return {
        "kl": float(values.mean()),
        "kl_p95": float(values.quantile(0.95)),
        "nll_nats": float(torch.stack(losses).mean()),
    }


class Asked:
    """A model of ``RuntimeLogits`` with generated tokens behind the first ``prompt`` tokens."""

    def __init__(self, executable: Executable) -> None:
        self.executable, self.prompt = executable, 0
        self.states, self.vocab_size = executable.states, executable.vocab_size
        self.max_model_len = executable.max_model_len

    def __call__(self, inputs: dict[str, Tensor]) -> Tensor:
        prompts = torch.full_like(inputs["seq_lens"], self.prompt)
        return self.executable({**inputs, PROMPT_LENS: prompts})


class AskedAfter(RuntimeAnswers):
    """Answers to questions of generated tokens, so the search for the evidence selects, too."""

    def __init__(self, executable: Executable) -> None:
        self.model = Asked(executable)
        super().__init__(RuntimeLogits(self.model, BLOCK, long_chunk=CHUNK))

    def answers(self, document: Document) -> list[Answered]:
        self.model.prompt = len(document.context)
        return super().answers(document)


def answers(
    full: Executable, some: Executable, tokenizer: object, tasks: Sequence[str], count: int
) -> dict[str, float]:
    """Losses of answers in nats a token, of the tasks with a signal of the full model."""
    found, given = {}, documents(tokenizer, [LONG], tasks, count=count)
    reference = KeptAnswers(lambda: RuntimeAnswers(RuntimeLogits(full, BLOCK, long_chunk=CHUNK)))
    served = RuntimeAnswers(RuntimeLogits(some, BLOCK, long_chunk=CHUNK))
    for name, source in (("answer", served), ("asked", AskedAfter(some))):
        report = score_long(source, given, reference)
        if report.loss is None:
            raise SystemExit("no task has a signal: the model answers nothing from the documents")
        print(f"  {name}: {report.loss.value:+.4f} nats, standard error {report.loss.stderr:.4f}", flush=True)
        found |= {f"{name}_nats": report.loss.value, f"{name}_stderr": report.loss.stderr}
        for task in report.tasks:
            loss = task.score.loss
            print(
                f"  {name}, {task.task}: {loss.value if loss else 0:+.4f} nats, signal: {task.signal}",
                flush=True,
            )
    return found


def speed(full: Model, some: Model, ids: Sequence[int], rounds: int) -> dict[str, float]:
    """Time of a decode step of the selecting model over that of the full model, by context."""
    some.fill(ids, LONG - 1)
    found, cpu = {}, {}
    for length in (*SHORT, LONG):
        best = [[float("inf")] * 2, [float("inf")] * 2]
        for number in range(2 * rounds):
            which = number % 2
            began = time.perf_counter(), time.process_time()
            (full, some)[which].logits(ids, length - 1, length, 1, 1)
            spent = time.perf_counter() - began[0], time.process_time() - began[1]
            best[which] = [min(pair) for pair in zip(best[which], spent, strict=True)]
        found[f"tpot_{length}"] = best[1][0] / best[0][0]
        cpu[f"cpu_{length}"] = best[1][1] / best[0][1]
        print(f"  {length}: {best[0][0] * 1e3:.2f} ms full, {best[1][0] * 1e3:.2f} ms selecting", flush=True)
    return found | cpu


@torch.inference_mode()
def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m bench.long select",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("artifact", help="an artifact for CPUs of a model with a context of 8,192 tokens")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--min-context", type=int, default=None)
    parser.add_argument("--dense", type=int, default=None)
    parser.add_argument("--windows", type=int, default=4, help="of text, for quality")
    parser.add_argument("--tasks", nargs="*", default=(), help="of ``optkit eval --long``; default: all")
    parser.add_argument("--documents", type=int, default=1, help="of each task, for answers")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="quality,answers,speed")
    given = parser.parse_args(arguments)
    full, some = models(given)
    tokenizer = load_tokenizer(given.artifact)
    ids = list(tokenizer(load_text("evaluation"), add_special_tokens=False).input_ids)
    parts, result = given.only.split(","), {"load_before": os.getloadavg()[0]}
    if "quality" in parts:
        result |= quality(full, some, ids, given.windows)
    if "answers" in parts:
        result |= answers(full.executable, some.executable, tokenizer, given.tasks, given.documents)
    if "speed" in parts:
        result |= speed(full, some, ids[:LONG], given.rounds)
    result["load_after"] = os.getloadavg()[0]
    missed = beyond(result, MOST)
    print_numbers(result, missed, 14, ".4f", MOST)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
