"""Generated documents: exact length, evidence at its depth, the same for the same seed."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from optkit.errors import UserError
from optkit.evaluation.long.document import Document
from optkit.evaluation.long.tasks import TASKS, documents
from tests.support.long_documents import tokenizer

LENGTH = 6000


def texts(document: Document) -> tuple[str, list[tuple[str, str]]]:
    decode = tokenizer().decode
    return decode(document.context), [(decode(q.prompt), decode(q.answer)) for q in document.questions]


@pytest.mark.parametrize("task", TASKS)
def test_a_document_has_the_asked_length_and_follows_from_the_seed(task: str) -> None:
    first, again, other = (
        documents(tokenizer(), [LENGTH], [task], questions=3, seed=seed)[0] for seed in (1, 1, 2)
    )
    assert first == again != other
    longest = max(len(question.prompt) + len(question.answer) for question in first.questions)
    assert len(first.context) + longest == LENGTH
    assert (first.task, first.length) == (task, LENGTH)


def test_a_document_does_not_depend_on_what_else_is_asked_for() -> None:
    alone = documents(tokenizer(), [LENGTH], ["needle"])
    among = documents(tokenizer(), [9000, LENGTH], ["quote", "needle"], count=2)
    assert alone[0] in among and len(among) == 8


@pytest.mark.parametrize("task", ["needle", "multikey"])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1 << 30))
@example(seed=464)  # a paragraph of a quarter of the document, at the depth of a number
def test_a_number_is_said_once_at_its_depth(task: str, seed: int) -> None:
    (document,) = documents(tokenizer(), [LENGTH], [task], seed=seed)
    context, asked = texts(document)
    for (prompt, answer), question in zip(asked, document.questions, strict=True):
        sentence = prompt.splitlines()[-1] + answer
        assert context.count(prompt.splitlines()[-1]) == 1
        assert question.depth is not None
        assert context.index(sentence) / len(context) == pytest.approx(question.depth, abs=0.2)
    assert len({prompt for prompt, _ in asked}) == 4


def test_a_variable_is_assigned_from_another_behind_its_value() -> None:
    (document,) = documents(tokenizer(), [LENGTH], ["variables"])
    context, asked = texts(document)
    for prompt, answer in asked:
        first = re.search(r"VAR (\w+) = (\d+), and", prompt)
        assert first is not None
        assert (
            0
            <= context.index(f"VAR {first[1]} = {first[2]}")
            < context.index(f"VAR{answer} = VAR {first[1]}")
        )


@pytest.mark.parametrize("task", ["common_words", "frequent_words"])
def test_the_answer_is_the_words_with_the_highest_counts(task: str) -> None:
    context, ((_, answer),) = texts(documents(tokenizer(), [LENGTH], [task])[0])
    counts = Counter(context.partition("\n\n")[2].split())
    assert {word for word, _ in counts.most_common(4)} == set(answer.split())
    assert all(counts[word] > 2 * counts.most_common(5)[4][1] for word in answer.split())


def test_a_quoted_passage_stands_in_the_document() -> None:
    context, asked = texts(documents(tokenizer(), [LENGTH], ["quote"])[0])
    for prompt, answer in asked:
        assert context.count(prompt.splitlines()[-1] + answer) == 1


def test_the_answer_to_a_question_about_the_text_stands_in_the_document() -> None:
    context, asked = texts(documents(tokenizer(), [LENGTH], ["qa"])[0])
    assert len({prompt for prompt, _ in asked}) == 4
    assert all(answer.strip() in context for _, answer in asked)


def test_what_cannot_be_made_is_one_clear_line() -> None:
    with pytest.raises(UserError, match="no such task"):
        documents(tokenizer(), [LENGTH], ["needles"])
    with pytest.raises(UserError, match="300 are too few"):
        documents(tokenizer(), [300], ["needle"])
