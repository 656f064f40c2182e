"""An answer that goes on in another engine is that of an undisturbed engine, wherever it was cut.

``tests.support.histories`` cuts answers under preemption, offloading, speculation and faults.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optkit.capture import boundary, capture
from optkit.lowering.lower import lower
from optkit.runtime.engine import Engine
from optkit.runtime.overlap import OverlapEngine
from optkit.runtime.runner import ModelRunner
from optkit.runtime.sampling.proposer import NgramProposer, Speculator
from optkit.runtime.scheduling.cost_model import CostModel
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.types import (
    Constraint,
    EngineRefusal,
    EngineRequest,
    FinishReason,
    SamplingParams,
    TokenLogprob,
    TokenOutput,
)
from tests.support import tiny_runtime
from tests.support.architectures import tiny_model
from tests.support.constrained import constrained_engine, encode, sampling
from tests.support.fakes import fake_engine
from tests.support.histories import Faults, FaultyRunner
from tests.support.speculation import Eager, needs_native

VOCAB = 64


class Answer(NamedTuple):
    """The tokens of an answer, with the stop token, and the end."""

    tokens: list[int]
    logprobs: list[TokenLogprob]
    reason: FinishReason | None
    stop_token: int | None


def answers(engine: Engine, requests: Sequence[EngineRequest]) -> list[Answer]:
    """The answers of ``requests``, made at once."""
    outputs: dict[str, list[TokenOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
    return [_answer(found) for found in outputs.values()]


def _answer(outputs: Sequence[TokenOutput]) -> Answer:
    assert outputs[-1].error is None
    tokens = [token for output in outputs for token in output.token_ids]
    logprobs = [entry for output in outputs for entry in output.logprobs]
    return Answer(tokens, logprobs, outputs[-1].finish_reason, outputs[-1].stop_token)


def request(name: str, prompt: Sequence[int], params: SamplingParams) -> EngineRequest:
    return EngineRequest(request_id=name, prompt_ids=tuple(prompt), sampling=params, arrival=0.0)


def continued(asked: EngineRequest, tokens: Sequence[int]) -> EngineRequest:
    ids = (*asked.prompt_ids, *tokens)
    return msgspec.structs.replace(asked, prompt_ids=ids, continued=len(tokens))


def last_cut(answer: Answer) -> int:
    """The most tokens after which the answer can be cut and still go on."""
    return len(answer.tokens) - (answer.stop_token is None)


def cut_everywhere(
    make: Callable[[], Engine], asked: Sequence[EngineRequest], whole: Sequence[Answer]
) -> None:
    """Continue each of ``asked`` from each place; compare with the rest of ``whole``."""
    cuts, wanted = [], []
    for single, answer in zip(asked, whole, strict=True):
        for at in range(last_cut(answer) + 1):
            cut = continued(single, answer.tokens[:at])
            cuts.append(msgspec.structs.replace(cut, request_id=f"{single.request_id} from {at}"))
            wanted.append(answer._replace(tokens=answer.tokens[at:], logprobs=answer.logprobs[at:]))
    for cut, found, right in zip(cuts, answers(make(), cuts), wanted, strict=True):
        assert found == right, cut.request_id


TOKEN = st.integers(0, VOCAB - 1)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 16),
    temperature=st.sampled_from([0.0, 0.8, 1.5]),
    top_p=st.sampled_from([1.0, 0.9]),
    top_k=st.sampled_from([0, 5]),
    min_p=st.sampled_from([0.0, 0.02]),
    seed=st.integers(0, 9),
    min_tokens=st.sampled_from([0, 0, 4, 9]),
    stop_token_ids=st.sampled_from([(), (3,), tuple(range(0, VOCAB, 5))]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.4]),
    logit_bias=st.dictionaries(TOKEN, st.sampled_from([-3.0, 4.0]), max_size=3).map(
        lambda d: tuple(d.items())
    ),
    allowed_token_ids=st.sampled_from([(), (), tuple(range(0, VOCAB, 2))]),
    logprobs=st.sampled_from([None, None, 0, 2]),
    bad_words=st.lists(st.lists(TOKEN, min_size=1, max_size=2).map(tuple), max_size=40).map(tuple),
)


def overlap_engine() -> Engine:
    config = SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=32, max_model_len=64, block_size=4, num_blocks=64
    )
    return OverlapEngine(FaultyRunner(Faults(), vocab_size=VOCAB), config)


@pytest.mark.parametrize("make", [fake_engine, overlap_engine])
@given(prompt=st.lists(TOKEN, min_size=1, max_size=9), params=PARAMS)
@settings(deadline=None, max_examples=60)
def test_a_continued_answer_equals_the_undisturbed_one_when_any_sampling_parameters_are_set(
    make: Callable[[], Engine], prompt: list[int], params: SamplingParams
) -> None:
    asked = [request("a", prompt, params)]
    cut_everywhere(make, asked, answers(make(), asked))


@needs_native
@pytest.mark.parametrize(
    "params", [SamplingParams(max_tokens=20, temperature=0.0), SamplingParams(max_tokens=20, seed=5)]
)
@pytest.mark.parametrize("guesses", [False, True])
def test_a_continued_answer_equals_the_undisturbed_one_when_the_kernels_are_int8(
    params: SamplingParams, guesses: bool
) -> None:
    def make() -> Engine:
        return tiny_runtime.engine(Speculator(NgramProposer(), Eager(CostModel(), 4)) if guesses else None)

    asked = [request(f"r{i}", prompt, params) for i, prompt in enumerate(tiny_runtime.prompts(6))]
    whole = answers(make(), asked)
    assert len({tuple(answer.tokens) for answer in whole}) == len(asked)
    cut_everywhere(make, asked, whole)


def test_a_continued_greedy_answer_equals_transformers() -> None:
    boundary.register()
    executable = lower(capture(tiny_model("llama", attention=boundary.NAME)))
    config = SchedulerConfig(
        max_num_seqs=6, max_num_batched_tokens=7, max_model_len=64, block_size=4, num_blocks=40
    )
    reference = tiny_model("llama")
    asked, whole = [], []
    for i in range(4):
        prompt = [(7 * i + 3 * j) % executable.vocab_size for j in range(5 * i + 1)]
        ids = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(12):
                ids = torch.cat([ids, reference(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        asked.append(request(f"r{i}", prompt, SamplingParams(max_tokens=12, temperature=0.0)))
        whole.append(Answer(ids[0, len(prompt) :].tolist(), [], FinishReason.LENGTH, None))
    cut_everywhere(lambda: Engine(ModelRunner(executable, 40, 4), config), asked, whole)


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "size": {"enum": [12, None, True]}},
        "required": ["name", "size"],
        "additionalProperties": False,
    }
)
CONSTRAINTS = [
    Constraint("json_schema", SCHEMA),
    Constraint("regex", "(ab|c[0-9])+;"),
    Constraint("choice", '["abc", "12", "true", "null", "name"]'),
    Constraint("json_schema", SCHEMA, after="<"),
]


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda found: found.kind + found.after)
def test_a_continued_answer_equals_the_undisturbed_one_when_a_constraint_holds(
    constraint: Constraint,
) -> None:
    asked = [
        request(f"r{seed}", encode("give"), sampling(constraint, seed=seed, max_tokens=40))
        for seed in range(6)
    ]
    whole = answers(constrained_engine(), asked)
    assert len({tuple(answer.tokens) for answer in whole}) > 1
    cut_everywhere(constrained_engine, asked, whole)


def test_prompt_logprobs_are_those_of_the_prompt_alone_when_an_answer_is_continued() -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0, prompt_logprobs=1)
    asked = request("a", range(10, 17), params)

    def scored(single: EngineRequest) -> list[TokenLogprob]:
        engine = fake_engine()
        engine.add_request(single)
        return [
            entry
            for _ in range(20)
            if engine.has_work
            for output in engine.step()
            for entry in output.prompt_logprobs
        ]

    whole = answers(fake_engine(), [asked])[0]
    assert [entry.token_id for entry in scored(asked)] == list(range(11, 17))
    assert scored(continued(asked, whole.tokens[:3])) == scored(asked)


def test_cached_tokens_are_those_of_the_prompt_when_the_answer_is_cached_too() -> None:
    engine = fake_engine()
    asked = request("a", range(10, 18), SamplingParams(max_tokens=20, temperature=0.0))
    whole = answers(engine, [asked])[0]
    engine.add_request(continued(asked, whole.tokens[:12]))
    first = [output.first for output in engine.step() if output.first]
    assert first[0].cached_tokens == 8
    assert engine.stats().prefix_cache_hits == 16, "the tokens of the answer were found, too"


@pytest.mark.parametrize(("length", "known"), [(6, 4), (6, 5), (6, 7), (6, -1), (62, 3)])
def test_a_request_is_refused_when_its_answer_has_no_token_left(length: int, known: int) -> None:
    ids = tuple(i % 50 for i in range(length + max(known, 0)))
    params = SamplingParams(max_tokens=4, temperature=0.0)
    asked = EngineRequest(request_id="a", prompt_ids=ids, sampling=params, arrival=0.0, continued=known)
    with pytest.raises(EngineRefusal, match=r"no token left|context"):
        fake_engine().add_request(asked)


def test_a_continued_request_is_not_given_up_when_the_queue_timeout_has_passed() -> None:
    engine = fake_engine(options={"queue_timeout": 0.001})
    asked = request("a", range(10, 17), SamplingParams(max_tokens=4, temperature=0.0))
    engine.add_request(asked)
    (new,) = engine.step()
    assert new.error is not None
    assert answers(engine, [continued(asked, [1])])[0].reason is FinishReason.LENGTH


def test_a_continued_request_goes_before_waiting_prompts() -> None:
    engine = fake_engine(options={"max_num_seqs": 1})
    params = SamplingParams(max_tokens=6, temperature=0.0)
    for name in ("running", "waiting"):
        engine.add_request(request(name, range(10, 17), params))
    engine.step()
    engine.add_request(continued(request("continued", range(20, 27), params), [1]))
    order = []
    while engine.has_work:
        order += [output.request_id for output in engine.step() if output.finish_reason]
    assert order.index("continued") < order.index("waiting")
