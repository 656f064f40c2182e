"""The source of guesses of an engine: the draft model of another artifact."""

from __future__ import annotations

import pytest

from optkit.errors import UserError
from optkit.recipe.engine_options import engine_options
from optkit.runtime.engine import Engine
from optkit.runtime.factory import open_engine
from optkit.runtime.sampling.proposer import Speculator
from optkit.runtime.speculation import draft_model, speculator
from optkit.runtime.types import SamplingParams
from tests.support.recurrent_model import RecurrentModel
from tests.support.shelf import Shelf


def answers(engine: Engine) -> list[list[int]]:
    return engine.generate([[3, 4, 5], [100, 101]], SamplingParams(max_tokens=12, temperature=0.0))


def test_a_draft_model_of_a_padded_vocabulary_is_used(shelf: Shelf) -> None:
    large, wide = shelf.put("large"), shelf.put("wide")
    engine = open_engine(large, speculative_model=wide, kv_cache_bytes=1 << 20)
    proposer = engine.scheduler.proposer
    assert isinstance(proposer, Speculator) and proposer.source.num_shared_ids == 128
    proposer.lengths.choose = lambda sequences, seconds: [3] * len(sequences)
    assert answers(engine) == answers(open_engine(large, kv_cache_bytes=1 << 20))
    assert proposer.stats.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("tokenizer", "message"), [('{"a": 1}', "another tokenizer"), (None, r"no tokenizer\.json")]
)
def test_a_draft_model_needs_the_same_tokenizer(shelf: Shelf, tokenizer: str | None, message: str) -> None:
    large, small = shelf.put("large"), shelf.put("small", tokenizer)
    with pytest.raises(UserError, match=message) as error:
        open_engine(large, speculative_model=small, kv_cache_bytes=1 << 20)
    assert error.value.where == small and "ngram" in error.value.fix


def test_a_name_that_is_no_artifact_and_no_method_is_refused(shelf: Shelf) -> None:
    with pytest.raises(UserError, match="no artifact 'Suffix'") as error:
        open_engine(shelf.put("large"), speculative_model="Suffix", kv_cache_bytes=1 << 20)
    assert "suffix and ngram" in error.value.fix


def test_the_largest_step_of_a_draft_model_leaves_nothing_behind(shelf: Shelf) -> None:
    artifact = shelf.open(shelf.put("large"))
    draft = draft_model(artifact, shelf.put("small"), 128)
    steps: list[tuple[int, int]] = []
    execute = draft.runner.execute
    draft.runner.execute = lambda batch: steps.append((len(batch.items), batch.num_tokens)) or execute(batch)
    for count in (1, 4, 100):
        draft.run_largest(count)
    assert steps == [(1, 32), (4, 32), (32, 32)]
    assert draft.blocks.num_used == 0
    draft.blocks.check([])


@pytest.mark.parametrize("method", ["ngram", "a draft model"])
def test_speculation_is_refused_when_the_model_is_recurrent(method: str) -> None:
    options = engine_options(None, {"speculative_model": method})
    with pytest.raises(UserError, match="wrong guesses can't be taken out"):
        speculator(None, RecurrentModel(), None, options)
