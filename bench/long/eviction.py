"""Eviction of KV behind a prefill by KeyDiff (arXiv 2504.15364), judged by answers to questions about long documents.

    python -m bench.long eviction smollm2-135m
    python -m bench.long eviction smollm2-135m --lengths 4096 --documents 2

transformers (float32, eager attention) reads the documents of ``optkit eval --long`` once each. Then a share of a
document's tokens is evicted, before any question is known: those with the keys most like the mean key, by the cosine,
summed over layers and heads, so that one block table serves all layers (``uniform``). Beside it stand the same choice
for each layer and head apart, which no shared block table can hold, the last tokens (``window``), and random tokens.
Kept tokens keep their positions. Each question is asked behind all KV and behind the rest.

``gain`` is the share of the gain (log-probability of the true answer, less without the document) left by an eviction,
over tasks with a signal; ``exact`` the number of answers with the most likely token at each place, over the number
with all KV. Standard errors are of ratios of sums over documents. Exit code 1: KeyDiff, uniform, with half of the
tokens, leaves less than ``LEAST`` of the gain.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.figures import command_line
from optkit.bench.environment import environment
from optkit.checkpoint.locate import resolve
from optkit.evaluation.long.document import Document, Question
from optkit.evaluation.long.score import LEAST_GAIN, blind
from optkit.evaluation.long.sources import Answered, ModuleAnswers
from optkit.evaluation.long.tasks import documents
from optkit.evaluation.quality import Estimate
from optkit.text.load import load_tokenizer

SINKS, RECENT = 4, 32  # tokens at both ends, not evicted by any method
SHARES = (0.75, 0.5)  # of the tokens that are kept
LEAST = 0.95
JUDGED = ("KeyDiff, uniform", 0.5)
ALL = "all tasks"
Pairs = list[tuple[Tensor, Tensor]]  # keys and values [Hkv, T, D] of each layer


def key_difference(keys: Tensor) -> Tensor:
    """The distance of each key [Hkv, T, D] from the mean direction: the negative cosine, [Hkv, T]."""
    anchor = torch.nn.functional.normalize(keys, dim=-1).mean(1, keepdim=True)
    return -torch.nn.functional.cosine_similarity(keys, anchor, dim=-1)


def uniform(pairs: Pairs) -> list[Tensor]:
    """The sum of the distances over layers and heads, the same [Hkv, T] for each layer."""
    total = torch.stack([key_difference(keys) for keys, _ in pairs]).sum((0, 1))
    return [total.expand(keys.shape[0], -1) for keys, _ in pairs]


def per_head(pairs: Pairs) -> list[Tensor]:
    """The distances of each layer and head."""
    return [key_difference(keys) for keys, _ in pairs]


def window(pairs: Pairs) -> list[Tensor]:
    """The positions: the last tokens are kept."""
    return [torch.arange(keys.shape[1], dtype=torch.float32).expand(keys.shape[0], -1) for keys, _ in pairs]


def at_random(pairs: Pairs) -> list[Tensor]:
    """A random number for each token."""
    total = torch.rand(pairs[0][0].shape[1], generator=torch.Generator().manual_seed(0))
    return [total.expand(keys.shape[0], -1) for keys, _ in pairs]


METHODS: dict[str, Callable[[Pairs], list[Tensor]]] = {
    "KeyDiff, uniform": uniform,
    "KeyDiff, per head": per_head,
    "window": window,
    "random": at_random,
}


def kept_places(score: Tensor, share: float) -> Tensor:
    """The places of the tokens with the highest ``score`` [Hkv, T], ascending; sinks and recent tokens among them."""
    length = score.shape[1]
    score = score.clone()
    score[:, :SINKS] = score[:, length - RECENT :] = math.inf
    return score.topk(round(length * share), dim=1).indices.sort(dim=1).values


def evicted(pairs: Pairs, scores: list[Tensor], share: float) -> Pairs:
    """The KV of the kept tokens, in order."""
    kept: Pairs = []
    for (keys, values), score in zip(pairs, scores, strict=True):
        places = kept_places(score, share)[..., None]
        kept.append(
            (
                keys.gather(1, places.expand(-1, -1, keys.shape[2])),
                values.gather(1, places.expand(-1, -1, values.shape[2])),
            )
        )
    return kept


class Reader(ModuleAnswers):
    """A transformers model that reads a document once, and answers behind all of its KV and behind a part."""

    @classmethod
    def load(cls, directory: Path) -> Reader:
        """The model of a local Hugging Face directory, in float32, with eager attention."""
        from transformers import AutoModelForCausalLM

        options = {"dtype": torch.float32, "local_files_only": True, "attn_implementation": "eager"}
        return cls(AutoModelForCausalLM.from_pretrained(directory, **options).eval())

    @torch.inference_mode()
    def read(self, document: Document) -> tuple[Pairs, list[Answered]]:
        """The KV of the context, and the answers behind all of it."""
        cache = self._cache(document.context)
        answers = [self._answer(document, question, cache) for question in document.questions]
        return [(layer.keys[0], layer.values[0]) for layer in cache.layers], answers

    @torch.inference_mode()
    def answer_behind(self, pairs: Pairs, length: int, question: Question) -> Answered:
        """The answer behind the kept KV of a context of ``length`` tokens."""
        from transformers import DynamicCache

        cache: Any = DynamicCache()
        for layer, (keys, values) in enumerate(pairs):
            cache.update(keys[None], values[None], layer)
        ids = torch.tensor([[*question.prompt, *question.answer[:-1]]])
        places = torch.arange(length, length + ids.shape[1])[None]
        count = len(question.answer)
        output = self.module(ids, past_key_values=cache, position_ids=places, logits_to_keep=count)
        return Answered.of(output.logits[0, -count:], question.answer)


@dataclass(frozen=True)
class Row:
    """An answer behind what an eviction left: log-probabilities in nats a token, and exact answers.

    ``gain`` and ``right`` are with all KV, ``loss`` is the log-probability with all KV less that with the rest.
    """

    document: int
    task: str
    length: int
    method: str
    share: float
    gain: float
    loss: float
    right: bool
    left: bool


def judged(reader: Reader, found: Sequence[Document]) -> Iterator[Row]:
    """The rows of all documents, questions, methods and shares."""
    for number, document in enumerate(found):
        pairs, whole = reader.read(document)
        without = reader.answers(blind(document))
        for name, method in METHODS.items():
            scores = method(pairs)
            for share in SHARES:
                kept = evicted(pairs, scores, share)
                for question, full, guess in zip(document.questions, whole, without, strict=True):
                    rest = reader.answer_behind(kept, len(document.context), question)
                    yield Row(
                        number,
                        document.task,
                        document.length,
                        name,
                        share,
                        float((full.logprobs - guess.logprobs).mean()),
                        float((full.logprobs - rest.logprobs).mean()),
                        bool(full.right.all()),
                        bool(rest.right.all()),
                    )


def with_signal(rows: Sequence[Row]) -> list[Row]:
    """The rows of tasks with a mean gain of at least ``LEAST_GAIN`` at their length."""
    gains: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row in rows:
        gains[row.task, row.length].append(row.gain)
    return [
        row
        for row in rows
        if sum(gains[row.task, row.length]) >= LEAST_GAIN * len(gains[row.task, row.length])
    ]


def ratio(parts: Sequence[float], wholes: Sequence[float], documents: Sequence[int]) -> Estimate:
    """The sum of ``parts`` over that of ``wholes``, with the standard error over documents; NaN without a whole."""
    total = math.fsum(wholes)
    if total <= 0:
        return Estimate(math.nan, math.nan)
    value = math.fsum(parts) / total
    apart: dict[int, float] = defaultdict(float)
    for part, whole, document in zip(parts, wholes, documents, strict=True):
        apart[document] += part - value * whole
    count = len(apart)
    square = math.fsum(each**2 for each in apart.values())
    return Estimate(value, math.sqrt(count / (count - 1) * square) / total if count > 1 else math.nan)


def gain_kept(rows: Sequence[Row]) -> Estimate:
    """The share of the gain that is left."""
    return ratio([r.gain - r.loss for r in rows], [r.gain for r in rows], [r.document for r in rows])


def exact_kept(rows: Sequence[Row]) -> Estimate:
    """Exact answers with the rest over those with all KV."""
    return ratio([r.left for r in rows], [r.right for r in rows], [r.document for r in rows])


def main(arguments: Sequence[str]) -> int:
    parser = command_line("bench.long eviction", __doc__)
    parser.add_argument("model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--tasks", nargs="+", default=[], help="default: all seven")
    parser.add_argument("--documents", type=int, default=4, help="of each task and length")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-result", type=Path)
    args = parser.parse_args(arguments)
    directory = resolve(args.model).directory
    made = documents(
        load_tokenizer(str(directory)), args.lengths, args.tasks, count=args.documents, seed=args.seed
    )
    started = time.perf_counter()
    rows = with_signal(list(judged(Reader.load(directory), made)))
    show(rows)
    print(f"{len(made)} documents, {time.perf_counter() - started:.0f} s")
    if args.save_result:
        result = {"kind": "eviction", "environment": environment(), "rows": [asdict(row) for row in rows]}
        args.save_result.write_text(json.dumps(result) + "\n")
    found = gain_kept([row for row in rows if (row.method, row.share) == JUDGED])
    if not found.value >= LEAST:
        print(f"MISSED {found.value:.3f} of the gain, at least {LEAST:g}")
        return 1
    return 0


def show(rows: Sequence[Row]) -> None:
    """Print a row for each task, method and share."""
    print(f"{'task':15} {'method':18} {'kept':>5} {'gain':>15} {'exact':>16} {'of':>5} {'loss, nats':>10}")
    for task in (ALL, *dict.fromkeys(row.task for row in rows)):
        for name in METHODS:
            for share in SHARES:
                mine = [r for r in rows if (r.method, r.share) == (name, share) and task in (ALL, r.task)]
                if not mine:
                    continue
                gain, exact = gain_kept(mine), exact_kept(mine)
                loss = math.fsum(row.loss for row in mine) / len(mine)
                print(
                    f"{task:15} {name:18} {share:5.2f} {gain.value:7.3f} ± {gain.stderr:.3f} "
                    f"{exact.value:8.3f} ± {exact.stderr:.3f} {sum(r.right for r in mine):5} {loss:10.3f}"
                )
