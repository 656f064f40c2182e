"""A long document with questions, assembled to an exact number of tokens.

Several questions share the context of a document: one prefill serves all, and a policy that selects or evicts KV works
before a question is known. Pieces of text are tokenized one by one, and each piece ends with a line break. So a
document has exactly the wanted tokens, with any tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from optkit.errors import UserError


@dataclass(frozen=True)
class Question:
    """Token ids of a question and of the true answer; ``depth`` of the evidence, 0 at the beginning, 1 at the end.

    ``depth`` is None where the evidence is spread over the whole document.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    depth: float | None = None


@dataclass(frozen=True)
class Document:
    """Token ids of a context and of the questions; context, question and answer have at most ``length`` tokens."""

    task: str
    length: int
    context: tuple[int, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Asked:
    """Texts of a question and of the answer; ``evidence`` is put into the context at ``depth``."""

    question: str
    answer: str
    evidence: tuple[str, ...] = ()
    depths: tuple[float, ...] = ()


@dataclass(frozen=True)
class Draft:
    """The texts of a document: first a heading, then ``filler`` as long as there is room, evidence in between."""

    heading: str
    filler: Iterator[str]
    asked: tuple[Asked, ...]


class Assembler:
    """Makes documents of drafts, with a transformers tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        first = tokenizer("a").input_ids[:1]
        self.bos = tuple(first) if first == [tokenizer.bos_token_id] else ()

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False).input_ids)

    def document(self, task: str, length: int, draft: Draft) -> Document:
        """The document of ``length`` tokens.

        Raises:
            UserError: evidence and question alone are longer.
        """
        asked = [(self.ids(one.question), self.ids(one.answer)) for one in draft.asked]
        heading = (*self.bos, *self.ids(draft.heading))
        evidence = [
            (depth, self.ids(text))
            for one in draft.asked
            for text, depth in zip(one.evidence, one.depths, strict=True)
        ]
        room = length - len(heading) - max(len(question) + len(answer) for question, answer in asked)
        room -= sum(len(ids) for _, ids in evidence)
        if room < 0:
            raise UserError(
                f"a document of the task {task} needs {length - room} tokens, {length} are too few",
                where="long evaluation",
                fix=f"give --lengths from {length - room} on, if the model's context allows",
            )
        pieces = self._fill(draft.filler, room)
        context = (*heading, *chain.from_iterable(_woven(pieces, evidence)))
        questions = (
            Question(prompt, answer, one.depths[0] if one.depths else None)
            for (prompt, answer), one in zip(asked, draft.asked, strict=True)
        )
        return Document(task, length, context, tuple(questions))

    def _fill(self, filler: Iterator[str], room: int) -> list[tuple[int, ...]]:
        """Pieces of together ``room`` tokens; the first is cut, so what stands before the question is whole."""
        pieces, left = [], room
        while left:
            ids = self.ids(next(filler))[-left:]
            pieces.append(ids)
            left -= len(ids)
        return pieces[::-1]


def _woven(
    pieces: Sequence[tuple[int, ...]], evidence: Sequence[tuple[float, tuple[int, ...]]]
) -> Iterator[tuple[int, ...]]:
    """``pieces`` in order, with each evidence at the border of pieces that is nearest to its depth."""
    total, done = sum(map(len, pieces)), 0
    waiting = sorted(evidence, key=lambda one: one[0])
    for piece in pieces:
        while waiting and waiting[0][0] * total <= done + len(piece) / 2:
            yield waiting.pop(0)[1]
        yield piece
        done += len(piece)
    yield from (ids for _, ids in waiting)
