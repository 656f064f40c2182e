"""Eviction of KV after a prefill by KeyDiff (arXiv 2504.15364), judged by answers to questions about long documents.

    python -m bench.long eviction smollm2-135m

A document is read once by transformers in float32. A share of its tokens is evicted before any question is known: those
whose keys are most like the mean key, by the cosine, summed over layers and heads, so that one block table serves all
layers (``uniform``); for comparison the same for each layer and head apart (``per head``, which no shared table can
hold), the last tokens with four sinks (``window``), and random tokens. Kept tokens keep their positions. Then each
question is asked after what is left.

``score`` is the share of the answers whose every token is the likeliest, among the answers that are so with all KV;
``logprob`` the mean change of an answer token's log-probability. The bound for a feature is a score of 0.95 at half of
the tokens.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from optkit.checkpoint.locate import resolve
from optkit.evaluation.long.document import Document, Question
from optkit.evaluation.long.tasks import documents
from optkit.text.load import load_tokenizer

SINKS, RECENT = 4, 32  # tokens that no method evicts
SHARES = (0.75, 0.5)  # of the tokens that are kept
LEAST = 0.95
Pairs = list[tuple[Tensor, Tensor]]  # keys and values [Hkv, T, D] of each layer


def key_difference(keys: Tensor) -> Tensor:
    """The distance of each key [Hkv, T, D] from the mean direction: less the cosine, [Hkv, T]."""
    unit = torch.nn.functional.normalize(keys, dim=-1)
    return -torch.nn.functional.cosine_similarity(unit, unit.mean(1, keepdim=True), dim=-1)


def uniform(pairs: Pairs) -> list[Tensor]:
    total = torch.stack([key_difference(keys) for keys, _ in pairs]).sum((0, 1))
    return [total.expand(keys.shape[0], -1) for keys, _ in pairs]


def per_head(pairs: Pairs) -> list[Tensor]:
    return [key_difference(keys) for keys, _ in pairs]


def window(pairs: Pairs) -> list[Tensor]:
    return [torch.arange(keys.shape[1], dtype=torch.float32).expand(keys.shape[0], -1) for keys, _ in pairs]


def chance(pairs: Pairs) -> list[Tensor]:
    total = torch.rand(pairs[0][0].shape[1], generator=torch.Generator().manual_seed(0))
    return [total.expand(keys.shape[0], -1) for keys, _ in pairs]


METHODS: dict[str, Callable[[Pairs], list[Tensor]]] = {
    "KeyDiff, uniform": uniform,
    "KeyDiff, per head": per_head,
    "window": window,
    "random": chance,
}


def evicted(pairs: Pairs, scores: list[Tensor], share: float) -> Pairs:
    """The KV of the tokens with the highest ``scores`` [Hkv, T], in order; sinks and the last tokens among them."""
    kept: Pairs = []
    for (keys, values), score in zip(pairs, scores, strict=True):
        length = keys.shape[1]
        score = score.clone()
        score[:, :SINKS] = score[:, length - RECENT :] = math.inf
        places = score.topk(round(length * share), dim=1).indices.sort(dim=1).values[..., None]
        kept.append(
            (
                keys.gather(1, places.expand(-1, -1, keys.shape[2])),
                values.gather(1, places.expand(-1, -1, values.shape[2])),
            )
        )
    return kept


class Reader:
    """A transformers model that reads a document once and answers questions after some of its KV."""

    def __init__(self, directory: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True
        ).eval()

    @torch.inference_mode()
    def read(self, context: Sequence[int]) -> Pairs:
        cache = self.model(torch.tensor([context]), use_cache=True, logits_to_keep=1).past_key_values
        return [(layer.keys[0], layer.values[0]) for layer in cache.layers]

    @torch.inference_mode()
    def answer(self, pairs: Pairs, length: int, question: Question) -> tuple[bool, float]:
        """True where each token of the answer is the likeliest, and the mean log-probability of its tokens."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer, (keys, values) in enumerate(pairs):
            cache.update(keys[None], values[None], layer)
        ids, count = [*question.prompt, *question.answer[:-1]], len(question.answer)
        positions = torch.arange(length, length + len(ids))[None]
        output = self.model(
            torch.tensor([ids]), past_key_values=cache, position_ids=positions, logits_to_keep=count
        )
        logits, wanted = output.logits[0].log_softmax(-1), torch.tensor(question.answer)
        return bool((logits.argmax(-1) == wanted).all()), float(logits.gather(1, wanted[:, None]).mean())


def judged(
    reader: Reader, found: Sequence[Document]
) -> Iterator[tuple[str, str, float, tuple[bool, float], tuple[bool, float]]]:
    """Task, method, kept share, and the answer with all KV and with what is left, of each question."""
    for document in found:
        pairs, length = reader.read(document.context), len(document.context)
        full = [reader.answer(pairs, length, question) for question in document.questions]
        for name, method in METHODS.items():
            scores = method(pairs)
            for share in SHARES:
                kept = evicted(pairs, scores, share)
                for question, whole in zip(document.questions, full, strict=True):
                    yield document.task, name, share, whole, reader.answer(kept, length, question)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.long eviction",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--tasks", nargs="+", default=["needle", "multikey", "variables", "quote", "qa"])
    parser.add_argument("--count", type=int, default=4, help="documents of each task and length")
    args = parser.parse_args(arguments)
    directory = str(resolve(args.model).directory)
    found = documents(load_tokenizer(directory), args.lengths, args.tasks, count=args.count)
    rows = list(judged(Reader(directory), found))
    print(f"{'task':12} {'method':18} {'kept':>5} {'right with all':>14} {'score':>7} {'logprob':>8}")
    for task in ("all", *dict.fromkeys(row[0] for row in rows)):
        for name in METHODS:
            for share in SHARES:
                mine = [row[3:] for row in rows if row[1:3] == (name, share) and task in ("all", row[0])]
                right = [left[0] for whole, left in mine if whole[0]]
                score = statistics.fmean(right) if right else math.nan
                change = statistics.fmean(left[1] - whole[1] for whole, left in mine)
                missed = "   MISSED" if task == "all" and share == 0.5 and not score >= LEAST else ""
                counts = f"{len(right):6} of {len(mine):4}"
                print(f"{task:12} {name:18} {share:5.2f} {counts} {score:7.3f} {change:8.3f}{missed}")
    return 0
