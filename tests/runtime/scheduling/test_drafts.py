"""Constrained answers of the engine: the same tokens in fewer steps, whatever happens around them."""

from __future__ import annotations

import json

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optkit.runtime.engine import Engine
from optkit.runtime.runner import ModelRunner
from optkit.runtime.sampling.proposer import NgramProposer, Speculator
from optkit.runtime.scheduling.config import SchedulerConfig
from optkit.runtime.scheduling.cost_model import CostModel
from optkit.runtime.scheduling.drafts import MAX_FORCED, Proposer
from optkit.runtime.structured import grammar
from optkit.runtime.structured.compiler import Grammars
from optkit.runtime.types import Constraint, EngineRequest, FinishReason, SamplingParams
from tests.runtime.sampling.test_tree_speculator import Priced
from tests.support import tiny_runtime
from tests.support.constrained import END, constrained_engine, decode, run, sampling, texts, vocabulary
from tests.support.speculation import Eager, Untimed, needs_native

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["ab", "abc", "12"]}, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "size", "tags", "ok"],
    "additionalProperties": False,
}
OBJECT = Constraint("json_schema", json.dumps(SCHEMA))
DIGITS = Constraint("regex", "[0-9]{1,20}(, [0-9]{1,20})*")
PROMPTS = [[1 + i % 5, 2, 3 + i] for i in range(12)]


def mixed(max_tokens: int = 60) -> list[SamplingParams]:
    """Constrained and free answers, greedy and drawn, with and without penalties."""
    kinds = (OBJECT, None, DIGITS, OBJECT)
    return [
        sampling(
            kinds[i % 4],
            seed=i,
            temperature=(0.0, 1.2)[i % 2],
            repetition_penalty=1.0 + 0.2 * (i % 3),
            max_tokens=max_tokens,
        )
        for i in range(len(PROMPTS))
    ]


def unforced(engine: Engine) -> Engine:
    """``engine`` without forced tokens."""
    engine.scheduler.drafts.forces = False
    return engine


def answers(engine: Engine, params: list[SamplingParams] | None = None) -> list[str]:
    return texts(engine, PROMPTS, params or mixed())


PLAIN = answers(unforced(constrained_engine()))


def test_constrained_answers_are_of_the_schema_unless_cut() -> None:
    for text, params in zip(PLAIN, mixed(), strict=True):
        if params.constraint == OBJECT and text.endswith("}"):
            jsonschema.validate(json.loads(text), SCHEMA)
    assert (
        sum(text.endswith("}") for text, p in zip(PLAIN, mixed(), strict=True) if p.constraint == OBJECT) == 6
    )


def test_forced_tokens_save_steps_and_change_nothing() -> None:
    slow, fast = unforced(constrained_engine()), constrained_engine()
    constrained = [sampling(OBJECT, seed=seed) for seed in range(len(PROMPTS))]
    assert answers(fast, constrained) == answers(slow, constrained)
    assert len(fast.runner.batches) < 0.6 * len(slow.runner.batches)
    assert fast.stats().forced_tokens > 12 * 8 and slow.stats().forced_tokens == 0
    assert answers(constrained_engine()) == PLAIN


def test_a_long_forced_text_does_not_take_a_step_of_a_prompt() -> None:
    text = "abc name 12 " * 20
    engine = constrained_engine(max_num_batched_tokens=512)
    (answer,) = texts(engine, [[1]], [sampling(Constraint("choice", json.dumps([text])), max_tokens=250)])
    assert answer == text
    assert max(batch.num_tokens for batch in engine.runner.batches) == MAX_FORCED + 1


@pytest.mark.parametrize("num_blocks", [27, 31])
def test_preempted_answers_are_the_same(num_blocks: int) -> None:
    engine = constrained_engine(num_blocks=num_blocks, max_model_len=100)
    assert answers(engine) == PLAIN
    assert engine.stats().num_preemptions > 0
    engine.scheduler.check()


@pytest.mark.parametrize("trees", [False, True])
def test_guesses_within_the_constraint_change_nothing(trees: bool) -> None:
    speculator: Proposer = Speculator(NgramProposer(), Eager(CostModel(), 5))
    if trees:
        speculator = Untimed(Priced(0.001), 8, recycles=True, max_cached_requests=8)
    engine = constrained_engine()
    engine.scheduler.proposer = speculator
    assert answers(engine) == PLAIN
    engine = unforced(constrained_engine())
    engine.scheduler.proposer = speculator
    assert answers(engine) == PLAIN


def test_models_with_a_recurrent_state_get_no_drafts_and_the_same_answers() -> None:
    plain = answers(unforced(constrained_engine(num_state_slots=8, num_checkpoints=2)))
    engine = constrained_engine(num_state_slots=8, num_checkpoints=2)
    assert answers(engine) == plain
    assert engine.stats().forced_tokens == 0


def test_a_state_that_is_lost_is_built_again_from_the_tokens() -> None:
    engine = constrained_engine()
    for name, params in zip("abc", mixed()[::3], strict=False):
        engine.add_request(EngineRequest(request_id=name, prompt_ids=(1, 2, 3), sampling=params, arrival=0.0))
    found: dict[str, str] = {"a": "", "b": "", "c": ""}
    while engine.has_work:
        for request in engine.scheduler.running:
            if request.matcher is not None:
                request.matcher = engine.grammars.matcher(request.sampling.constraint, request.sampling)  # type: ignore[union-attr]
        for output in engine.step():
            found[output.request_id] += decode(output.token_ids)
    wanted = texts(constrained_engine(), [[1, 2, 3]] * 3, mixed()[::3][:3])
    assert list(found.values()) == wanted


def request(name: str, params: SamplingParams, prompt: tuple[int, ...] = (1, 2)) -> EngineRequest:
    return EngineRequest(request_id=name, prompt_ids=prompt, sampling=params, arrival=0.0)


@pytest.mark.parametrize(
    ("constraint", "fields", "text", "reason"),
    [
        (Constraint("choice", '["name"]'), {}, "name", FinishReason.STOP),
        (Constraint("choice", '["name"]'), {"stop_token_ids": ()}, "name", FinishReason.STOP),
        (Constraint("choice", '["name"]'), {"min_tokens": 9}, "name", FinishReason.STOP),
        (Constraint("choice", '["name"]'), {"max_tokens": 1}, "name", FinishReason.STOP),
        (Constraint("choice", '["name size"]'), {"max_tokens": 2}, "name ", FinishReason.LENGTH),
        (Constraint("regex", "a*"), {"max_tokens": 7, "stop_token_ids": ()}, "a" * 7, FinishReason.LENGTH),
        (Constraint("regex", "a*"), {"max_tokens": 7, "min_tokens": 7}, "a" * 7, FinishReason.LENGTH),
        (Constraint("regex", "a{9}"), {"stop_token_ids": (END, ord("a"))}, "", FinishReason.STOP),
    ],
)
def test_the_end_of_an_answer(
    constraint: Constraint, fields: dict[str, object], text: str, reason: FinishReason
) -> None:
    outputs = run(constrained_engine(), [request("r", sampling(constraint, **fields))])["r"]
    assert "".join(decode(output.token_ids) for output in outputs) == text
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert outputs[-1].finish_reason is reason


def test_outputs_of_forced_tokens_come_a_token_at_a_time() -> None:
    outputs = run(constrained_engine(), [request("r", sampling(OBJECT))])["r"]
    assert {len(output.token_ids) for output in outputs} == {1}


def test_a_constraint_that_becomes_too_complex_ends_its_own_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar, "STEP_LEXER_FUEL", 50)
    hard = Constraint("regex", "(.*[a-f].{50}[g-z].*){200}")
    plain = run(constrained_engine(), [request("free", sampling(None))])["free"]
    outputs = run(constrained_engine(), [request("hard", sampling(hard)), request("free", sampling(None))])
    assert outputs["hard"][-1].finish_reason is FinishReason.ERROR and "constraint" in str(
        outputs["hard"][-1].error
    )
    assert [o.token_ids for o in outputs["free"]] == [o.token_ids for o in plain]


def test_a_batch_that_fails_is_run_again_with_the_same_answers() -> None:
    """The step runs a second time, request by request, after the states have followed the drafts of the first."""
    engine = constrained_engine(poison_token=31)
    params = [sampling(OBJECT if i % 2 else DIGITS, seed=i, temperature=1.2) for i in range(6)]
    requests = [request(str(i), p, tuple(PROMPTS[i])) for i, p in enumerate(params)]
    outputs = run(engine, [*requests[:3], request("bad", sampling(None), (31,)), *requests[3:]])
    assert outputs.pop("bad")[-1].finish_reason is FinishReason.ERROR
    found = ["".join(decode(o.token_ids) for o in of_one) for of_one in outputs.values()]
    assert found == texts(constrained_engine(), PROMPTS[:6], params)


@settings(max_examples=30)
@given(
    num_blocks=st.integers(26, 60),
    budget=st.integers(9, 64),
    max_num_seqs=st.integers(1, 8),
    arrivals=st.lists(st.integers(0, 12), min_size=len(PROMPTS), max_size=len(PROMPTS)),
    aborts=st.dictionaries(st.integers(0, len(PROMPTS) - 1), st.integers(0, 40), max_size=4),
    guesses=st.sampled_from(["none", "chains", "trees"]),
)
def test_no_history_changes_an_answer(
    num_blocks: int,
    budget: int,
    max_num_seqs: int,
    arrivals: list[int],
    aborts: dict[int, int],
    guesses: str,
) -> None:
    """Requests that come and go, in little memory, in chunks, with guesses: who stays gets the same answer."""
    engine = constrained_engine(
        num_blocks=num_blocks, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, max_model_len=100
    )
    if guesses == "chains":
        engine.scheduler.proposer = Speculator(NgramProposer(), Eager(CostModel(), 4))
    if guesses == "trees":
        engine.scheduler.proposer = Untimed(Priced(0.001), 8, recycles=True, max_cached_requests=8)
    found = {str(i): "" for i in range(len(PROMPTS))}
    pending = sorted(range(len(PROMPTS)), key=lambda i: arrivals[i])
    params, step = mixed(), 0
    while pending or engine.has_work:
        while pending and arrivals[pending[0]] <= step:
            i = pending.pop(0)
            engine.add_request(request(str(i), params[i], tuple(PROMPTS[i])))
        for i, when in aborts.items():
            if when == step:
                engine.abort(str(i))
        for output in engine.step():
            found[output.request_id] += decode(output.token_ids)
        engine.scheduler.check()
        step += 1
    for i, text in enumerate(PLAIN):
        assert found[str(i)] == text if i not in aborts else text.startswith(found[str(i)])
    assert engine.stats().kv_blocks_used == 0


@needs_native
def test_a_model_says_the_same_with_forced_tokens_and_neighbours_keep_their_bits() -> None:
    """Real kernels: constrained answers with and without drafts, free ones with and without constrained neighbours."""
    prompts = tiny_runtime.prompts(8)
    free = [SamplingParams(max_tokens=20, temperature=1.0, seed=i, logprobs=2) for i in range(4)]
    constrained = [
        SamplingParams(max_tokens=70, temperature=1.0, seed=i, constraint=OBJECT, stop_token_ids=(END,))
        for i in range(4)
    ]

    def engine() -> Engine:
        config = SchedulerConfig(**tiny_runtime.LIMITS | {"max_model_len": 160, "num_blocks": 256})
        made = Engine(ModelRunner(tiny_runtime.int8_llama(), config.num_blocks, config.block_size), config)
        made.grammars = Grammars(lambda: vocabulary(128))
        return made

    alone = run(engine(), [request(f"f{i}", p, tuple(prompts[i])) for i, p in enumerate(free)])
    slow = run(
        unforced(engine()), [request(f"c{i}", p, tuple(prompts[4 + i])) for i, p in enumerate(constrained)]
    )
    both = [(f"f{i}", p, prompts[i]) for i, p in enumerate(free)]
    both += [(f"c{i}", p, prompts[4 + i]) for i, p in enumerate(constrained)]
    mixed_engine = engine()
    together = run(mixed_engine, [request(name, p, tuple(ids)) for name, p, ids in both])
    for name in alone:
        assert [(o.token_ids, o.logprobs) for o in together[name]] == [
            (o.token_ids, o.logprobs) for o in alone[name]
        ]
    for name in slow:
        assert [o.token_ids for o in together[name]] == [o.token_ids for o in slow[name]]
    assert mixed_engine.stats().forced_tokens > 20
