"""Answers of each kind of source, against a plain forward pass of transformers over the whole prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from optkit.evaluation.long.document import Document, Question
from optkit.evaluation.long.sources import (
    Answered,
    ModuleAnswers,
    RuntimeAnswers,
    ServedAnswers,
    answer_source,
    context_of,
)
from optkit.evaluation.quality import ModuleLogits
from optkit.evaluation.served import Scored
from optkit.lowering.lower import lower
from optkit.runtime.logits import RuntimeLogits
from tests.support.architectures import tiny_model
from tests.support.graphs import captured, random_ids

CONTEXT, FIRST, SECOND = (tuple(ids.tolist()) for ids in random_ids((61, 9, 14)))
DOCUMENT = Document(
    "some", 75, CONTEXT, (Question(FIRST[:6], FIRST[6:], 0.5), Question(SECOND[:13], SECOND[13:], 0.1))
)


def expected(model: Any, question: Question) -> Answered:
    ids = torch.tensor([CONTEXT + question.prompt + question.answer])
    with torch.no_grad():
        rows = model(input_ids=ids, use_cache=False).logits[0]
    return Answered.of(rows[-len(question.answer) - 1 : -1], question.answer)


@pytest.mark.parametrize("name", ["llama", "mistral", "lfm2", "olmo_hybrid"])
@pytest.mark.parametrize("kind", ["module", "runtime"])
def test_answers_are_those_of_the_whole_prompt(name: str, kind: str) -> None:
    model = tiny_model(name)
    if kind == "module":
        source: Any = ModuleAnswers(model)
    else:
        source = RuntimeAnswers(RuntimeLogits(lower(captured(name)), block_size=4))
    for _ in range(2):  # the second time over the KV of the first
        for given, question in zip(source.answers(DOCUMENT), DOCUMENT.questions, strict=True):
            wanted = expected(model, question)
            torch.testing.assert_close(given.rows, wanted.rows, atol=2e-4, rtol=2e-4)
            torch.testing.assert_close(given.logprobs, wanted.logprobs, atol=2e-4, rtol=2e-4)
            assert given.right.tolist() == wanted.right.tolist()


def test_rows_at_positions_are_those_of_the_whole_window() -> None:
    model, window = tiny_model("llama"), [*CONTEXT, *FIRST]
    positions = [0, 3, 4, 40, 69]
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([window]), use_cache=False).logits[0][positions]
    runtime = RuntimeAnswers(RuntimeLogits(lower(captured("llama")), block_size=4))
    for source in (ModuleAnswers(model), runtime):
        torch.testing.assert_close(source.rows(window, positions), wanted, atol=1e-4, rtol=1e-4)


def test_a_server_is_asked_for_context_question_and_answer_at_once() -> None:
    model = tiny_model("llama")

    class Server:
        def score(self, prompt: list[int]) -> Scored:
            with torch.no_grad():
                rows = (
                    model(input_ids=torch.tensor([prompt]), use_cache=False)
                    .logits[0]
                    .log_softmax(-1)
                    .double()
                )
            values = rows[:-1].gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0]
            return Scored(values, [{f"token_id:{int(row.argmax())}": float(row.max())} for row in rows[:-1]])

    given = ServedAnswers(Server(), str).answers(DOCUMENT)  # type: ignore[arg-type]
    for one, question in zip(given, DOCUMENT.questions, strict=True):
        wanted = expected(model, question)
        torch.testing.assert_close(one.logprobs, wanted.logprobs, atol=1e-5, rtol=1e-5)
        assert one.right.tolist() == wanted.right.tolist() and one.rows is None


def test_nan_is_an_error() -> None:
    with pytest.raises(FloatingPointError):
        Answered.of(torch.full((1, 4), torch.nan), [1])


def test_an_opened_model_gives_its_answers_and_its_context() -> None:
    module = ModuleLogits(tiny_model("llama"))
    runtime = RuntimeLogits(lower(captured("llama")))
    assert isinstance(answer_source(module), ModuleAnswers) and isinstance(
        answer_source(runtime), RuntimeAnswers
    )
    assert context_of(module) == context_of(runtime) == module.module.config.max_position_embeddings
