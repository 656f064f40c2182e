"""Profiles of an artifact in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from optkit.errors import UserError
from optkit.evaluation.profiled import profile
from optkit.kernels.cpu import native
from tests.fuzz.seeds import write_seeds
from tests.support.target import not_measured  # noqa: F401 - a fixture

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("artifacts")
    write_seeds(directory, ["llama-int8-kv"])
    return directory / "llama-int8-kv"


def test_profile_has_both_phases_at_the_lengths_asked_for(artifact: Path) -> None:
    report = profile(artifact, prompt_tokens=20, context=30, steps=2)
    prefill, decode = report.phases
    assert prefill.label == "prefill of 20 tokens"
    assert decode.label in ("decode of 1 sequence at 31 tokens", "decode of 1 sequence at 32 tokens")
    assert len(prefill.all_seconds) == len(decode.all_seconds) == 2
    assert prefill.accounted > 0.5 and prefill.rows[0].lost > 0


@pytest.mark.parametrize("context", [30, 128, 64])
def test_a_decode_of_several_sequences_has_all_of_them(artifact: Path, context: int) -> None:
    """Also where prompts fill the steps of the recipe: later ones wait for room beside the first ones' decodes."""
    report = profile(artifact, prompt_tokens=20, context=context, steps=2, sequences=4)
    _, decode = report.phases
    assert decode.label.startswith("decode of 4 sequences at ") and len(decode.all_seconds) == 2
    assert len(decode.timeline.step.work) == 4


def test_a_sequence_alone_may_reach_the_limit(artifact: Path) -> None:
    report = profile(artifact, prompt_tokens=20, context=256 - 4, steps=1)
    assert report.phases[1].label == "decode of 1 sequence at 253 tokens"


@pytest.mark.parametrize(("sequences", "fix"), [(10_000, "max_num_seqs"), (4, "a shorter --context")])
def test_more_sequences_than_decode_at_once_are_refused(artifact: Path, sequences: int, fix: str) -> None:
    with pytest.raises(UserError, match="--sequences: ") as refused:
        profile(artifact, prompt_tokens=20, context=250, steps=3, sequences=sequences)
    assert fix in str(refused.value.fix)


@pytest.mark.parametrize("name", ["prompt_tokens", "context"])
def test_lengths_beyond_the_model_are_refused(artifact: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')}"):
        profile(artifact, **{"prompt_tokens": 20, "context": 20, name: 9000})
