"""Results: sums and means of scored text, the first choice of a completion."""

from __future__ import annotations

import math

from optkit.api.results import Choice, Completion, Completions, ScoredText, TokenScore, single


def test_a_scored_text_sums_what_follows_the_first_token() -> None:
    scored = ScoredText("ab", (TokenScore(1, "a", None), TokenScore(2, "b", -2.0), TokenScore(3, "c", -1.0)))
    assert scored.values == [-2.0, -1.0] and scored.total == -3.0 and scored.mean == -1.5
    assert scored.perplexity == math.exp(1.5)
    assert math.isnan(ScoredText("a", (TokenScore(1, "a", None),)).mean)


def test_a_completion_is_its_first_choice() -> None:
    completion = Completion("p", (1,), (Choice("one", (2,), "stop"), Choice("two", (3,), "length")))
    assert (str(completion), completion.token_ids, completion.finish_reason) == ("one", (2,), "stop")
    assert completion._repr_html_().count("<tr>") == 3
    assert single([completion], True) is completion
    assert single([completion], False) == Completions([completion])
