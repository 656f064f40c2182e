"""Generators of long documents, after the tasks of RULER (Hsieh et al. 2024), written anew.

Words are plain English, numbers have five digits, and the haystack is the held-out text shipped with optkit.
Everything follows from the seed. Prompts are plain continuations ("The number of the amber falcon is:"), so models
without instruction tuning take part.

* ``needle``: sentences with a number, hidden in text.
* ``multikey``: sentences with a number and nothing else; the right key among hundreds.
* ``variables``: assignments hidden in text; the variable set to another variable.
* ``common_words``, ``frequent_words``: words of a list, or made-up words, by count.
* ``quote``: a passage of the text, to be continued word by word.
* ``qa``: questions about the text, in other words than the text's.

The evidence of the two tasks of counting is spread over the whole document: a model without the distant text still
knows the answer. The evidence of the other tasks is at a known depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from optkit.errors import UserError, nearest
from optkit.evaluation.long.document import Asked, Assembler, Document, Draft
from optkit.evaluation.long.questions import FACTS, paragraph_of, paragraphs
from optkit.evaluation.long.words import ADJECTIVES, NOUNS

LENGTHS = (1024, 2048, 4096, 8192)
FOUND = 4  # words asked for, in lists of words
QUOTED = 10  # words of a passage that a question repeats, and as many of the answer
LETTERS = [f"{a}{b}{c}" for a in "ABCDEFGH" for b in "KLMNPQ" for c in "RSTVWXYZ"]

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
    """``count`` documents of each length and task (default: all), the shortest first.

    Args:
        tokenizer: a transformers tokenizer; lengths are in its tokens, context, question and answer together.
        questions: about a document, at most; the tasks of counting have one.
        seed: the same seed gives the same documents, whatever else is asked for.

    Raises:
        UserError: no such task, or a length without room for the evidence.
    """
    for task in tasks:
        if task not in TASKS:
            raise UserError("no such task of long documents", where=task, fix=nearest(task, TASKS))
    assembler = Assembler(tokenizer)
    return [
        assembler.document(task, length, TASKS[task](Random(f"{seed}/{task}/{length}/{index}"), questions))
        for length in sorted(lengths)
        for task in tasks or TASKS
        for index in range(count)
    ]


def haystack(random: Random, without: Sequence[str] = ()) -> Iterator[str]:
    """Paragraphs of the held-out text, backwards from a random paragraph, without end."""
    found = paragraphs()
    at = random.randrange(len(found))
    while True:
        if found[at] not in without:
            yield found[at] + "\n"
        at = (at - 1) % len(found)


def spread(random: Random, count: int) -> list[float]:
    """Depths of ``count`` pieces of evidence, each in another part."""
    return [(i + random.random()) / count for i in range(count)]


def digits(random: Random) -> str:
    return "".join(random.choices("0123456789", k=5))


# -- numbers -------------------------------------------------------------------------------------------


def needle(random: Random, questions: int) -> Draft:
    """Some keys with numbers, in text."""
    asked = _numbers(random, questions)
    return Draft("Some numbers are hidden in the following text. Remember them.\n\n", haystack(random), asked)


def multikey(random: Random, questions: int) -> Draft:
    """Some keys with numbers, among other keys with numbers."""
    asked = _numbers(random, questions)
    taken = {one.question for one in asked}

    def others() -> Iterator[str]:
        while True:
            other = _number(random, f"{random.choice(ADJECTIVES)} {random.choice(NOUNS)}", 0.0)
            if other.question not in taken:
                yield other.evidence[0]

    return Draft("Remember the following numbers.\n\n", others(), asked)


def _numbers(random: Random, count: int) -> tuple[Asked, ...]:
    keys = zip(random.sample(ADJECTIVES, count), random.sample(NOUNS, count), strict=True)
    return tuple(
        _number(random, " ".join(key), depth) for key, depth in zip(keys, spread(random, count), strict=True)
    )


def _number(random: Random, key: str, depth: float) -> Asked:
    number, said = digits(random), f"The special magic number of the {key} is:"
    question = f"\nQuestion: Which number was given?\n{said}"
    return Asked(question, f" {number}", (f"{said} {number}.\n",), (depth,))


def variables(random: Random, questions: int) -> Draft:
    """Chains ``VAR A = 12345`` and, somewhere behind, ``VAR B = VAR A``."""
    names = random.sample(LETTERS, 2 * questions)
    asked = []
    for first, last, depth in zip(names[::2], names[1::2], spread(random, questions), strict=True):
        number = digits(random)
        evidence = (f"VAR {first} = {number}\n", f"VAR {last} = VAR {first}\n")
        question = (
            f"\nQuestion: Which variables have the value {number}?\n"
            f"Answer: VAR {first} = {number}, and the variable that is set to VAR {first} is VAR"
        )
        asked.append(Asked(question, f" {last}", evidence, (depth, depth + (1 - depth) * random.random())))
    heading = "Track the variables that are assigned in the following text.\n\n"
    return Draft(heading, haystack(random), tuple(asked))


# -- counts --------------------------------------------------------------------------------------------


def common_words(random: Random, questions: int) -> Draft:
    """Lines of English words."""
    return _counted(random, "common", random.sample(NOUNS, len(NOUNS)))


def frequent_words(random: Random, questions: int) -> Draft:
    """Lines of made-up words."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    return _counted(random, "frequent", ["".join(random.sample(syllables, 2)) for _ in range(len(NOUNS))])


def _counted(random: Random, kind: str, words: Sequence[str]) -> Draft:
    """``FOUND`` words in every line, and as many other words."""
    found, others = list(words[:FOUND]), [word for word in words[FOUND:] if word not in words[:FOUND]]

    def lines() -> Iterator[str]:
        while True:
            line = [*found, *random.sample(others, FOUND)]
            random.shuffle(line)
            yield " ".join(line) + "\n"

    question = (
        f"\nQuestion: Which are the {FOUND} most {kind} words in the lines above?"
        f"\nAnswer: The most {kind} words are:"
    )
    asked = Asked(question, "".join(f" {word}" for word in found))
    return Draft("Count how often each word is in the following lines.\n\n", lines(), (asked,))


# -- text ----------------------------------------------------------------------------------------------


def quote(random: Random, questions: int) -> Draft:
    """Passages from the middle of paragraphs."""
    long = [text for text in paragraphs() if 3 * QUOTED <= len(text.split(" ")) <= 6 * QUOTED]
    chosen = random.sample(long, questions)
    asked = []
    for paragraph, depth in zip(chosen, spread(random, questions), strict=True):
        words = paragraph.split(" ")
        at = random.randrange(len(words) - 2 * QUOTED)
        given, hidden = words[at : at + QUOTED], words[at + QUOTED : at + 2 * QUOTED]
        question = f"\nQuestion: How does this passage of the text go on?\n{' '.join(given)}"
        asked.append(Asked(question, f" {' '.join(hidden)}", (f"{paragraph}\n",), (depth,)))
    return Draft("Remember the following text word for word.\n\n", haystack(random, chosen), tuple(asked))


def qa(random: Random, questions: int) -> Draft:
    """Questions about paragraphs of the text."""
    facts = random.sample(FACTS, min(questions, len(FACTS)))
    asked = tuple(
        Asked(
            f"\nQuestion: {fact.question}\nAnswer (as in the text):",
            f" {fact.answer}",
            (f"{paragraph_of(fact)}\n",),
            (depth,),
        )
        for fact, depth in zip(facts, spread(random, len(facts)), strict=True)
    )
    known = [paragraph_of(fact) for fact in FACTS]
    heading = "Answer questions about the following text.\n\n"
    return Draft(heading, haystack(random, known), asked)


TASKS: dict[str, Generator] = {
    "needle": needle,
    "multikey": multikey,
    "variables": variables,
    "common_words": common_words,
    "frequent_words": frequent_words,
    "quote": quote,
    "qa": qa,
}
