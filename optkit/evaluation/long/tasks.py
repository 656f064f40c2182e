"""Generators of long documents, after the tasks of RULER (Hsieh et al. 2024), written anew.

Each generator is a function ``(random, questions) -> Draft``; the draft's filler never ends. Words are plain English,
numbers have five digits, and the haystack is the held-out text shipped with optkit. Everything follows from the seed.
Prompts are plain continuations ("The number of the amber falcon is"), so models without instruction tuning take part.

* ``needle``: sentences with a number, hidden in text.
* ``multikey``: sentences with a number and nothing else; the right key among hundreds.
* ``variables``: chains of assignments in text; the value of the chain's last variable.
* ``common_words``, ``frequent_words``: words of a list, or of made-up letters, by their counts.
* ``quote``: a sentence of the text, to be continued word by word.
* ``qa``: questions about the text, in plain words (``questions.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from random import Random
from typing import Any

from optkit.evaluation.long.document import Asked, Assembler, Document, Draft
from optkit.evaluation.long.words import ADJECTIVES, NOUNS
from optkit.text.corpora import load_text

LENGTHS = (1024, 2048, 4096, 8192)
COMMON = 4  # words asked for, in lists of words
QUOTED = 8  # words of a sentence that a question repeats
QUOTE_ANSWER = 8  # words of a sentence to be continued

Generator = Callable[[Random, int], Draft]


def documents(
    tokenizer: Any,
    lengths: Sequence[int] = LENGTHS,
    tasks: Sequence[str] = (),
    *,
    count: int = 1,
    questions: int = 4,
    seed: int = 0,
) -> list[Document]:
    """``count`` documents of each task (default: all) and length, each with up to ``questions`` questions.

    Args:
        tokenizer: a transformers tokenizer; lengths are in its tokens.

    Raises:
        KeyError: no such task.
        ValueError: a length has no room for the evidence.
    """
    assembler = Assembler(tokenizer)
    return [
        assembler.document(task, length, TASKS[task](Random(f"{seed}/{task}/{length}/{index}"), questions))
        for length in lengths
        for task in tasks or TASKS
        for index in range(count)
    ]


# -- needles -------------------------------------------------------------------------------------------


def needle(random: Random, questions: int) -> Draft:
    return Draft(
        "Some numbers are hidden in the following text. Remember them.\n\n",
        haystack(random),
        tuple(_number(random, depth, key) for key, depth in _keys(random, questions)),
    )


def multikey(random: Random, questions: int) -> Draft:
    asked = tuple(_number(random, depth, key) for key, depth in _keys(random, questions))
    taken = {one.question for one in asked}

    def others() -> Iterator[str]:
        while True:
            other = _number(random, 0.0, f"{random.choice(ADJECTIVES)} {random.choice(NOUNS)}")
            if other.question not in taken:
                taken.add(other.question)
                yield other.evidence[0]

    return Draft("Remember the following numbers.\n\n", others(), asked)


def _number(random: Random, depth: float, key: str) -> Asked:
    digits = "".join(random.choices("0123456789", k=5))
    said = f"The special magic number of the {key} is:"
    return Asked(f"\nQuestion: Which number was given?\n{said}", f" {digits}", (f"{said} {digits}.\n",), (depth,))


def _keys(random: Random, count: int) -> list[tuple[str, float]]:
    """Different keys, each with a depth in a different part of the document."""
    nouns, adjectives = random.sample(NOUNS, count), random.sample(ADJECTIVES, count)
    return [
        (f"{adjective} {noun}", (i + random.random()) / count)
        for i, (adjective, noun) in enumerate(zip(adjectives, nouns, strict=True))
    ]


# -- chains --------------------------------------------------------------------------------------------


def variables(random: Random, questions: int) -> Draft:
    """Chains of two assignments each, ``VAR B = VAR A`` after ``VAR A = 12345``."""
    names = iter(random.sample([f"{a}{b}{c}" for a in "ABCDEFGH" for b in "KLMNPQ" for c in "RSTVWXYZ"], 2 * questions))
    asked = []
    for i in range(questions):
        first, last = next(names), next(names)
        digits = "".join(random.choices("0123456789", k=5))
        depths = sorted((i + random.random()) / questions for _ in range(2))
        evidence = (f"VAR {first} = {digits}\n", f"VAR {last} = VAR {first}\n")
        question = f"\nQuestion: Which variable has the value {digits}, and which one is set to it?\nVAR {first} = {digits}\nVAR"
        asked.append(Asked(question, f" {last} = VAR {first}", evidence, tuple(depths)))
    return Draft("Track the variables that are assigned in the following text.\n\n", haystack(random), tuple(asked))


# -- counts --------------------------------------------------------------------------------------------


def common_words(random: Random, questions: int) -> Draft:
    words = random.sample(NOUNS, len(NOUNS))
    return _counted(random, "common", words)


def frequent_words(random: Random, questions: int) -> Draft:
    letters = {"".join(random.choices("bcdfgklmnprstvz", k=1)[0] + random.choice("aeiou") for _ in range(3)) for _ in range(80)}
    return _counted(random, "frequent", sorted(letters))


def _counted(random: Random, kind: str, words: Sequence[str]) -> Draft:
    """Lines of words, in which ``COMMON`` words are in each line and others now and then."""
    frequent, rest = list(words[:COMMON]), list(words[COMMON:])

    def lines() -> Iterator[str]:
        while True:
            line = [*frequent, *random.sample(rest, COMMON)]
            random.shuffle(line)
            yield " ".join(line) + "\n"

    question = f"\nQuestion: Which are the {COMMON} most {kind} words in the lines above?\nAnswer: The most {kind} words are:"
    answer = "".join(f" {word}" for word in frequent)
    return Draft(f"Count how often each word is in the following lines.\n\n", lines(), (Asked(question, answer),))


# -- text ----------------------------------------------------------------------------------------------


def quote(random: Random, questions: int) -> Draft:
    paragraphs = _paragraphs()
    start = random.randrange(len(paragraphs))
    raise NotImplementedError


def haystack(random: Random) -> Iterator[str]:
    """Paragraphs of the held-out text, backwards from a random one, without end."""
    paragraphs = _paragraphs()
    at = random.randrange(len(paragraphs))
    while True:
        yield paragraphs[at] + "\n"
        at -= 1


@cache
def _paragraphs() -> tuple[str, ...]:
    return tuple(line for line in load_text("evaluation").split("\n") if line.strip())


TASKS: dict[str, Generator] = {
    "needle": needle,
    "multikey": multikey,
    "variables": variables,
    "common_words": common_words,
    "frequent_words": frequent_words,
}
