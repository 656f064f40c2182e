"""vLLM's speculative_config in the place of flags."""

from __future__ import annotations

import pytest

from optkit.errors import UserError
from optkit.recipe.engine_options import checked, engine_options


def test_the_object_stands_for_the_flags() -> None:
    text = '{"method": "suffix", "num_speculative_tokens": 24, "suffix_decoding_max_cached_requests": 0}'
    options = engine_options(given={"speculative_config": text})
    assert options.speculative_model == "suffix"
    assert options.num_speculative_tokens == 24
    assert options.speculative_cached_requests == 0
    assert options.speculative_config is None
    assert engine_options(given={"speculative_config": '{"method": "ngram"}'}).speculative_model == "ngram"
    assert checked({"speculative_config": '{"model": "small/"}'}).speculative_model == "small/"
    assert (
        checked({"speculative_config": '{"method": "ngram", "model": "ngram"}'}).speculative_model == "ngram"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ngram", "malformed"),
        ("[]", "object"),
        ('{"methd": "ngram"}', "methd"),
        ('{"method": "eagle3", "model": "x"}', "unknown method 'eagle3'"),
        ('{"method": "draft_model"}', "needs a model"),
        ('{"num_speculative_tokens": 3}', "no method is given"),
        ('{"method": "suffix", "model": "small/"}', "has no model"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', ">= 1"),
        ('{"method": "ngram", "num_speculative_tokens": "many"}', "int"),
    ],
)
def test_a_wrong_object_is_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        checked({"speculative_config": text})
    assert "\n" not in caught.value.what
