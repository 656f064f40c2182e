"""Logits of a device against the same logits on the host; a tensor of the CPU is in the place of a device's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from optkit.runtime.cuda import device_logits
from optkit.runtime.sampling import logprobs, sampler
from optkit.runtime.sampling.sampler import BAD_LOGITS, NONE_LEFT
from optkit.runtime.types import EngineRequest, Request, SamplingParams

VOCAB = 300
PARAMS: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.0, "repetition_penalty": 1.4, "presence_penalty": 0.5},
    {"temperature": 1.1, "top_p": 0.7, "frequency_penalty": 0.3},
    {"temperature": 0.9, "top_k": 7, "min_p": 0.05},
    {"temperature": 0.0, "allowed_token_ids": (5, 9)},
    {"temperature": 0.7, "logit_bias": ((7, 3.0),), "min_tokens": 9, "stop_token_ids": (2,)},
)


@pytest.fixture(params=[True, False], ids=["native", "numpy"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(sampler.native, "available", lambda: False)


def requests() -> list[Request]:
    made = []
    for seed, params in enumerate(PARAMS * 3):
        sampling = SamplingParams(max_tokens=20, seed=seed, **params)  # type: ignore[arg-type]
        received = EngineRequest(request_id=str(seed), prompt_ids=(1, 2), sampling=sampling, arrival=0.0)
        made.append(Request(received, [1, 2, seed, 7]))
    return made


def rows(count: int) -> np.ndarray:
    return 2.0 * np.random.default_rng(5).standard_normal((count, VOCAB), dtype=np.float32)


@pytest.mark.usefixtures("native")
def test_tokens_are_those_of_the_host() -> None:
    asked = requests()
    logits = rows(len(asked))
    found = device_logits.sample(torch.from_numpy(logits), asked)
    assert found == sampler.sample(logits, asked)
    assert len(set(found)) > 10


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_without_numbers_fail_alone_as_on_the_host(bad: float) -> None:
    asked = requests()[:7]
    logits = rows(7)
    good = sampler.sample(logits, asked)
    for row in (0, 1, 3):
        logits[row, 4 if bad > 0 or np.isnan(bad) else slice(None)] = bad
    found = device_logits.sample(torch.from_numpy(logits), asked)
    assert found == sampler.sample(logits, asked)
    assert found == [BAD_LOGITS if row in (0, 1, 3) else token for row, token in enumerate(good)]


def test_a_request_that_excludes_every_token_fails_for_its_own_reason() -> None:
    sampling = SamplingParams(max_tokens=4, allowed_token_ids=(3,), bad_words=((3,),))
    received = EngineRequest(request_id="r", prompt_ids=(1,), sampling=sampling, arrival=0.0)
    assert device_logits.sample(torch.from_numpy(rows(1)), [Request(received, [1])]) == [NONE_LEFT]


def test_only_rows_that_need_more_than_a_maximum_are_copied_to_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied: list[int] = []
    host = sampler.sample

    def noting(logits: np.ndarray, asked: list[Request]) -> object:
        copied.append(len(logits))
        return host(logits, asked)

    monkeypatch.setattr(sampler, "sample", noting)
    asked = requests()
    device_logits.sample(torch.from_numpy(rows(len(asked))), asked)
    assert copied == [len(asked) - 3]
    greedy = [request for request in asked if sampler.is_plain_greedy(request)]
    device_logits.sample(torch.from_numpy(rows(len(greedy))), greedy)
    assert len(copied) == 1


def test_largest_logits_are_those_of_the_host() -> None:
    logits = rows(5)
    logits[1, 7], logits[2], logits[3, 0] = np.nan, -np.inf, np.inf
    best, finite = device_logits.best_tokens(torch.from_numpy(logits))
    wanted, wanted_finite = sampler.best_tokens(logits)
    assert finite == wanted_finite == [True, False, False, False, True]
    assert [token for token, good in zip(best, finite, strict=True) if good] == [wanted[0], wanted[4]]


@pytest.mark.parametrize("num_top", [0, 1, 5, VOCAB + 3])
def test_logprobs_are_those_of_the_host(num_top: int) -> None:
    logits, tokens = rows(6), [0, 5, 7, VOCAB - 1, 9, 30]
    logits[2, 7] = -np.inf
    found = device_logits.logprobs_of(torch.from_numpy(logits), tokens, num_top)
    for mine, theirs in zip(found, logprobs.logprobs_of(logits, tokens, num_top), strict=True):
        assert mine.token_id == theirs.token_id
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
        assert [v for _, v in mine.top] == pytest.approx([v for _, v in theirs.top], abs=1e-5)


def test_rows_of_scored_and_other_items_are_put_together() -> None:
    logits = torch.from_numpy(rows(3))
    assert torch.equal(device_logits.stacked(list(logits)), logits)


def test_logits_of_another_device_than_the_cpu_are_sampled_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names by which the host's functions call this module."""
    elsewhere = torch.zeros(1, VOCAB, device="meta")
    for name in ("sample", "best_tokens", "logprobs_of", "stacked"):
        monkeypatch.setattr(device_logits, name, lambda *_, name=name: name)
    assert sampler.sample(elsewhere, requests()[:1]) == "sample"
    assert sampler.best_tokens(elsewhere) == "best_tokens"
    assert logprobs.logprobs_of(elsewhere, [1], 0) == "logprobs_of"
    assert logprobs.stacked([elsewhere[0]]) == "stacked"
