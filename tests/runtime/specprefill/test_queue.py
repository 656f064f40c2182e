"""Answers to a part of a prompt: against transformers with explicit positions; cuts, preemption, caches, ends."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch

from optkit.graph.ir import Graph
from optkit.lowering.lower import Executable, lower
from optkit.runtime.draft_tree import DraftTree
from optkit.runtime.engine import Engine
from optkit.runtime.kv.rolling import RollingWindow
from optkit.runtime.runner import ModelRunner
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.specprefill.graph import ScoredLayer, scoring_graph
from optkit.runtime.specprefill.queue import ScoringQueue, SpecPrefillOptions
from optkit.runtime.specprefill.scorer import PromptScorer
from optkit.runtime.specprefill.scoring import Scoring
from optkit.runtime.specprefill.settings import SpecPrefill
from optkit.runtime.tree_graph import with_positions
from optkit.runtime.types import (
    Batch,
    EngineRefusal,
    EngineRequest,
    FinishReason,
    SamplingParams,
    TokenOutput,
)
from tests.runtime.sampling.test_tree_speculator import Priced
from tests.support.architectures import tiny_model
from tests.support.graphs import captured, random_ids
from tests.support.speculation import Untimed, needs_native
from tests.support.target import TARGET
from tests.support.tiny_runtime import int8_graph

ANSWER = 12
LENGTHS = (240, 190, 230)
PROMPTS = [ids.tolist() for ids in random_ids(LENGTHS)]
LIMITS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
    "max_model_len": 256,
    "block_size": 8,
    "num_blocks": 128,
}
SPARSE = SpecPrefill(enabled=True, keep_pct=0.6)
GREEDY = SamplingParams(max_tokens=ANSWER, temperature=0.0, logprobs=0)


@functools.cache
def models(name: str) -> tuple[Executable, Executable, tuple[ScoredLayer, ...]]:
    """The model, its first layers, and their columns."""
    graph: Graph = int8_graph() if name == "int8" else captured(name)
    scoring, layers = scoring_graph(graph, 2)
    return lower(graph.clone(), TARGET), lower(scoring, TARGET), layers


def engine(name: str = "int8", threshold: int = 128, **limits: Any) -> Engine:
    model, scoring, layers = models(name)
    config = SchedulerConfig(**LIMITS | limits)
    made = Engine(ModelRunner(model, config.num_blocks, config.block_size), config)
    made.specprefill = ScoringQueue(
        lambda: PromptScorer(scoring, layers, config.block_size, config.max_num_batched_tokens),
        SpecPrefillOptions(threshold=threshold),
    )
    return made


def request(name: str, prompt: Sequence[int], **fields: Any) -> EngineRequest:
    given = {"sampling": GREEDY, "arrival": 0.0, "specprefill": SPARSE} | fields
    return EngineRequest(request_id=name, prompt_ids=tuple(prompt), **given)


def run(made: Engine, *asked: EngineRequest) -> list[list[TokenOutput]]:
    outputs: dict[str, list[TokenOutput]] = {each.request_id: [] for each in asked}
    for each in asked:
        made.add_request(each)
    while made.has_work:
        for output in made.step():
            outputs[output.request_id].append(output)
        made.scheduler.check()
    return list(outputs.values())


def tokens(outputs: Sequence[TokenOutput]) -> list[int]:
    assert outputs[-1].error is None
    return [token for output in outputs for token in output.generated_ids]


def kept_of(prompt: Sequence[int], share: float, name: str = "int8") -> list[int]:
    made = engine(name).specprefill._make_scorer()  # type: ignore[misc]
    positions = made.advance(Scoring.of(prompt, -(-int(share * 100) * len(prompt) // 100)), 1000)
    assert positions is not None
    return positions.kept.tolist()


def of_transformers(model: Any, prompt: Sequence[int], kept: Sequence[int]) -> tuple[list[int], list[float]]:
    """Greedy tokens after the kept tokens at their positions, and their log-probabilities."""
    ids, positions, answer, scores = [prompt[at] for at in kept], list(kept), list[int](), list[float]()
    for step in range(ANSWER):
        with torch.no_grad():
            places, seen = (
                torch.tensor([positions]),
                torch.ones(1, len(ids)),
            )  # else gaps are borders of texts
            logits = model(torch.tensor([ids]), attention_mask=seen, position_ids=places).logits[0, -1]
        best = int(logits.argmax())
        answer.append(best)
        scores.append(float(logits.log_softmax(-1)[best]))
        ids.append(best)
        positions.append(len(prompt) + step)
    return answer, scores


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_answers_are_those_of_transformers_at_the_kept_positions(name: str) -> None:
    model = tiny_model(name).eval()
    for prompt in PROMPTS:
        kept = kept_of(prompt, 0.6, name)
        assert len(kept) < len(prompt)
        answer, scores = of_transformers(model, prompt, kept)
        (outputs,) = run(engine(name), request("a", prompt))
        assert tokens(outputs) == answer
        found = [entry.logprob for output in outputs for entry in output.logprobs]
        torch.testing.assert_close(found, scores, atol=2e-4, rtol=2e-4)
        first = outputs[0].first
        assert first is not None and first.kept_tokens == len(kept) and first.cached_tokens == 0


@functools.cache
def alone() -> tuple[list[int], ...]:
    return tuple(tokens(run(engine(), request("a", prompt))[0]) for prompt in PROMPTS)


def test_answers_differ_from_those_to_the_whole_prompts() -> None:
    whole = [tokens(run(engine(), request("a", prompt, specprefill=None))[0]) for prompt in PROMPTS]
    assert list(alone()) != whole


@pytest.mark.parametrize(
    "limits", [{"max_num_batched_tokens": 33}, {"max_num_seqs": 2}, {"prefill_target_tokens": 16}]
)
def test_answers_depend_on_no_chunk_and_no_neighbour(limits: dict[str, int]) -> None:
    asked = [request(str(n), prompt) for n, prompt in enumerate(PROMPTS)]
    asked += [request(f"whole {n}", prompt, specprefill=None) for n, prompt in enumerate(PROMPTS)]
    found = [tokens(outputs) for outputs in run(engine(**limits), *asked)]
    assert found[:3] == list(alone())
    assert found[3:] == [tokens(run(engine(), each)[0]) for each in asked[3:]]


def test_a_preempted_request_computes_the_same_tokens_again() -> None:
    made = engine(max_num_batched_tokens=64)
    outputs: dict[str, list[TokenOutput]] = {str(n): [] for n in range(len(PROMPTS))}
    for name, prompt in zip(outputs, PROMPTS, strict=True):
        made.add_request(request(name, prompt))
    steps = 0
    while made.has_work:
        for output in made.step():
            outputs[output.request_id].append(output)
        steps += 1
        if steps % 7 == 0 and made.scheduler.running:
            made.scheduler.preempt(made.scheduler.running[-1])
    assert made.scheduler.num_preemptions >= 3
    assert [tokens(found) for found in outputs.values()] == list(alone())


class Trees(ModelRunner):
    """Counts steps with trees of guesses."""

    num_trees = 0

    def execute(self, batch: Batch) -> torch.Tensor:
        self.num_trees += any(isinstance(item.draft, DraftTree) for item in batch.items)
        return super().execute(batch)


@needs_native
@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 33}])
def test_trees_of_guesses_behind_gaps_change_nothing(limits: dict[str, int]) -> None:
    """Positions with gaps are no tree, and the nodes of a tree count from the position of the last known token."""
    config = SchedulerConfig(**LIMITS | limits)
    model = lower(with_positions(int8_graph()), TARGET)
    runner = Trees(model, config.num_blocks, config.block_size)
    speculator = Untimed(Priced(0.001), 8, recycles=True, max_cached_requests=8)
    made = Engine(runner, config, None, speculator)
    made.specprefill = engine().specprefill
    asked = [request(str(n), prompt) for n, prompt in enumerate(PROMPTS)]
    asked += [request(f"whole {n}", prompt, specprefill=None) for n, prompt in enumerate(PROMPTS)]
    free = SamplingParams(max_tokens=ANSWER, temperature=0.0)  # without logprobs, which get no guesses
    asked = [msgspec.structs.replace(each, sampling=free) for each in asked]
    wanted = [tokens(outputs) for outputs in run(engine(), *asked)]
    assert [tokens(outputs) for outputs in run(made, *asked)] == wanted
    assert runner.num_trees > 1


def test_kv_of_a_part_is_never_cached_and_cached_kv_never_taken() -> None:
    made, prompt = engine(), PROMPTS[0]
    run(made, request("part", prompt))
    assert not made.scheduler.kv.held_nodes() and not made.scheduler.kv.num_queries
    (whole,) = run(made, request("whole", prompt, specprefill=None))
    assert whole[0].first is not None and whole[0].first.cached_tokens == 0
    assert tokens(whole) == tokens(run(engine(), request("a", prompt, specprefill=None))[0])
    nodes = len(made.scheduler.kv.held_nodes())
    assert nodes >= len(prompt) // 8
    made.specprefill.options = SpecPrefillOptions(threshold=1)
    cached = made.scheduler.kv.cached_tokens
    made.scheduler.kv.cached_tokens = lambda request: 0 if request.positions is None else cached(request)  # type: ignore[method-assign]
    (part,) = run(made, request("again", prompt))
    assert tokens(part) == alone()[0] and part[0].first is not None and part[0].first.cached_tokens == 0
    assert len(made.scheduler.kv.held_nodes()) == nodes


def test_a_prompt_with_cached_kv_is_computed_whole() -> None:
    made, prompt = engine(), PROMPTS[0]
    (whole,) = run(made, request("whole", prompt, specprefill=None))
    (again,) = run(made, request("again", prompt))
    assert tokens(again) == tokens(whole)
    assert (
        again[0].first is not None
        and again[0].first.kept_tokens is None
        and again[0].first.cached_tokens > 200
    )


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({"specprefill": SpecPrefill(enabled=False)}, SpecPrefillOptions(enabled=True, threshold=1)),
        ({"specprefill": None}, SpecPrefillOptions(threshold=1)),
        ({"specprefill": SpecPrefill(enabled=True, keep_pct=1.0)}, SpecPrefillOptions(threshold=1)),
        ({}, SpecPrefillOptions(threshold=len(PROMPTS[0]) + 1)),
        ({"rolling": RollingWindow(64, 4)}, SpecPrefillOptions(enabled=True, threshold=1)),
        (
            {"sampling": msgspec.structs.replace(GREEDY, prompt_logprobs=0)},
            SpecPrefillOptions(threshold=1),
        ),
    ],
)
def test_other_prompts_are_computed_whole(asked: dict[str, Any], options: SpecPrefillOptions) -> None:
    made = engine()
    made.specprefill.options = options
    (outputs,) = run(made, request("a", PROMPTS[0], **asked))
    first = next(output.first for output in outputs if output.first)
    assert first.kept_tokens is None and made.specprefill.num_scored == 0


def test_the_engines_choice_is_for_requests_without_one() -> None:
    made = engine()
    made.specprefill.options = SpecPrefillOptions(enabled=True, keep_pct=0.6, threshold=128)
    (outputs,) = run(made, request("a", PROMPTS[0], specprefill=None))
    assert tokens(outputs) == alone()[0]
    stats = made.stats()
    assert stats.specprefill_tokens == len(PROMPTS[0])
    assert 0 < stats.specprefill_kept_tokens < len(PROMPTS[0])


def test_an_answer_ends_where_the_context_ends() -> None:
    long = request("a", PROMPTS[0], sampling=msgspec.structs.replace(GREEDY, max_tokens=500))
    (outputs,) = run(engine(max_model_len=250), long)
    assert outputs[-1].finish_reason is FinishReason.LENGTH and len(tokens(outputs)) == 250 - len(PROMPTS[0])


def test_an_answer_goes_on_in_another_engine() -> None:
    whole = alone()[0]
    for cut in (1, 5, ANSWER - 1):
        ids = (*PROMPTS[0], *whole[:cut])
        (outputs,) = run(engine(), request("a", ids, continued=cut))
        assert tokens(outputs) == whole[cut:]


def test_penalties_count_the_tokens_that_are_left_out() -> None:
    """A penalty that bans every token of the prompt: the answer has none of them."""
    prompt = PROMPTS[0]
    strong = SamplingParams(max_tokens=ANSWER, temperature=0.0, repetition_penalty=10.0)
    unused = set(range(128)) - set(prompt)
    left_out = set(prompt) - {prompt[at] for at in kept_of(prompt, 0.6)}
    assert left_out and len(unused) >= ANSWER
    made = engine()
    seen = []
    add = made.scheduler.add
    made.scheduler.add = lambda *a: (seen.append(a[2]), add(*a))[1]  # type: ignore[method-assign]
    run(made, request("a", prompt, sampling=strong))
    assert set(seen[0].left_out) == left_out


def test_a_prompt_that_cannot_be_scored_is_computed_whole() -> None:
    made = engine()

    def fail(scoring: Scoring, limit: int) -> None:
        raise RuntimeError("no")

    made.specprefill._is_possible()
    made.specprefill._scorer.advance = fail  # type: ignore[union-attr, method-assign, assignment]
    (outputs,) = run(made, request("a", PROMPTS[0]))
    assert outputs[0].first is not None and outputs[0].first.kept_tokens is None
    assert tokens(outputs) == tokens(run(engine(), request("a", PROMPTS[0], specprefill=None))[0])


def test_a_request_leaves_the_queue_when_it_is_dropped() -> None:
    made = engine(max_num_batched_tokens=16)
    made.add_request(request("a", PROMPTS[0]))
    made.add_request(request("b", PROMPTS[1]))
    assert made.stats().num_waiting == 2
    with pytest.raises(EngineRefusal, match="'a' is being served"):
        made.add_request(request("a", PROMPTS[2]))
    made.step()
    ended = made.abort("a")
    assert ended is not None and ended.finish_reason is FinishReason.ABORT
    assert made.abort("a") is None
    outputs = []
    while made.has_work:
        outputs += made.step()
    assert tokens(outputs) == alone()[1]


def test_a_departed_client_stops_the_scoring() -> None:
    made = engine(max_num_batched_tokens=64)
    made.add_request(request("a", PROMPTS[0]))
    made.departed = lambda: {"a"}
    assert made.step() == [] and made.specprefill._queue[0].scoring.part.num_computed == 0
    assert made.abort("a") is not None and not made.has_work


def test_a_request_waits_no_longer_than_the_queue_timeout() -> None:
    made = engine(max_num_batched_tokens=16, queue_timeout=10.0)
    now = [100.0]
    made.specprefill.clock = lambda: now[0]
    made.add_request(request("a", PROMPTS[0], arrival=99.0))
    made.add_request(request("b", PROMPTS[1], arrival=99.0))
    assert made.step() == []
    now[0] = 110.0
    (output,) = made.step()
    assert output.request_id == "b" and output.finish_reason is FinishReason.ERROR


def test_a_request_that_can_never_be_served_is_refused_at_once() -> None:
    with pytest.raises(EngineRefusal, match="leaves no room to answer"):
        engine().add_request(request("a", PROMPTS[0] * 2))


def test_decodes_go_on_between_the_parts_of_a_prompt() -> None:
    made = engine(max_num_batched_tokens=512, prefill_target_tokens=16)
    made.add_request(
        request("short", PROMPTS[0][:9], sampling=msgspec.structs.replace(GREEDY, max_tokens=100))
    )
    made.step()
    made.add_request(request("long", PROMPTS[0]))
    seen = []
    while made.specprefill.has_work:
        seen.append([output.request_id for output in made.step()])
    assert len(seen) >= len(PROMPTS[0]) // 16 and all(names == ["short"] for names in seen[:-1])
