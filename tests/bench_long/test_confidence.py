"""The rule of a confidence fallback, by hand, and the record of two forms against each alone."""

from __future__ import annotations

import pytest
import torch

from bench.long.confidence import ANSWER, PROMPT, THRESHOLDS, Forms, Recorded, Row, pays, recorded, table
from optkit.evaluation.quality import ModuleLogits
from optkit.lowering.lower import lower
from tests.support.architectures import tiny_model
from tests.support.graphs import apply, captured, random_ids

FOUND = Recorded(
    margin=torch.tensor([0.01, 0.3, 5.0, 5.0]),
    narrow=torch.tensor([0.0, 0.0, 1.0, 0.0]),
    wide=torch.tensor([1.0, 1.0, 0.0, 1.0]),
    narrow_kl=torch.tensor([0.4, 0.4, 0.4, 0.4]),
    wide_kl=torch.tensor([0.1, 0.1, 0.1, 0.1]),
)


def test_the_fallback_takes_the_wide_form_below_the_threshold() -> None:
    narrow, wide, *rows = table(FOUND, 10.0, 15.0)
    assert (narrow.agreement, wide.agreement) == (0.25, 0.75)
    first, last = rows[0], rows[THRESHOLDS.index(0.5)]
    assert (first.rate, first.milliseconds, first.agreement) == (0.25, 13.75, 0.5)
    assert (last.rate, last.milliseconds, last.agreement) == (0.5, 17.5, 0.75)
    assert first.chance == pytest.approx(0.25 + 0.75 * 0.5)  # three of four tokens in the wide form alone
    assert last.chance == 0.75 and last.kl == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("milliseconds", "agreement", "gain", "expected"),
    [
        (9.0, 0.75, 0.03, True),
        (9.0, 0.748, 0.03, True),
        (9.0, 0.74, 0.03, False),
        (14.5, 0.9, 0.03, False),
        (9.0, 0.75, 0.01, False),  # the narrow form is as good
    ],
)
def test_a_rule_pays_as_good_as_the_wide_form_in_less_time(
    milliseconds: float, agreement: float, gain: float, expected: bool
) -> None:
    wide = Row("wide", 0.0, 15.0, 0.75, 0.1)
    assert pays(Row("rule", 0.1, milliseconds, agreement, 0.1, gain, 0.01), wide) is expected


def test_answer_tokens_run_in_both_forms_behind_a_prompt_in_the_wide_one() -> None:
    graph = captured("llama", max_position_embeddings=PROMPT + ANSWER)
    coarse = graph.clone()
    apply(coarse, "rtn", scheme="W4A16", group_size=32)
    model = tiny_model("llama", max_position_embeddings=PROMPT + ANSWER)
    window = random_ids([PROMPT + ANSWER])[0].tolist()
    found = recorded(Forms(lower(coarse), lower(graph)), ModuleLogits(model), [window])
    assert found.margin.shape == found.wide.shape == (ANSWER,) and bool((found.margin >= 0).all())
    assert bool((found.wide == 1).all()) and float(found.wide_kl.max()) < 1e-5  # float layers
    assert float(found.narrow_kl.mean()) > 1e-3
