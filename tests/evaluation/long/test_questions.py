"""Questions about the shipped text, against the text."""

from __future__ import annotations

import pytest

from optkit.evaluation.long.questions import FACTS, Fact, paragraph_of, paragraphs


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.answer)
def test_one_paragraph_has_the_answer_and_the_question_does_not(fact: Fact) -> None:
    assert sum(paragraph.startswith(fact.start) for paragraph in paragraphs()) == 1
    assert fact.answer in paragraph_of(fact)
    assert fact.answer.lower() not in fact.question.lower()


def test_no_question_twice() -> None:
    assert len({fact.question for fact in FACTS}) == len({fact.start for fact in FACTS}) == len(FACTS)
