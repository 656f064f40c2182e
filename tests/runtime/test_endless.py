"""Answers longer than the context, with sinks and a rolling window, against transformers' eager attention.

The oracle is one forward pass in float32 with explicit positions and an explicit mask. The sinks stand there once for
each position that they take: a copy sees itself alone, and is seen by the tokens of its time. Neither blocks nor a
cache nor chunks are in it.
"""

from __future__ import annotations

import itertools

import msgspec
import pytest
import torch
from torch import Tensor

from optkit.kernels.cpu import native
from optkit.lowering.lower import Executable, lower
from optkit.runtime.engine import Engine
from optkit.runtime.kv.offload import MemoryBlocks
from optkit.runtime.kv.rolling import Rolling, RollingWindow
from optkit.runtime.runner import ModelRunner
from optkit.runtime.scheduling.scheduler import Proposer, SchedulerConfig
from optkit.runtime.tree_graph import with_positions
from optkit.runtime.types import EngineRefusal, EngineRequest, SamplingParams, TokenOutput
from tests.runtime.sampling.test_tree_speculator import Priced
from tests.runtime.test_captured_model import HalfRight, Poisoned
from tests.support.architectures import tiny_model
from tests.support.graphs import apply, captured
from tests.support.speculation import Untimed, needs_native
from tests.support.target import TARGET

BLOCK, CONTEXT = 4, 40
WINDOW = RollingWindow(window=10, sinks=2)
NEW_TOKENS = 60
SPARSE = {"cover": 0.7, "min_tokens": 64, "measure_tokens": 0}


class Disturbed(Poisoned):
    """Preempts a few requests, with time between to compute them again."""

    steps = 0

    def step(self) -> list[TokenOutput]:
        self.steps += 1
        if self.steps in (20, 50, 51, 100, 160) and self.scheduler.running:
            self.scheduler.preempt(self.scheduler.running[self.steps % len(self.scheduler.running)])
        return super().step()


def engine(
    model: Executable,
    num_blocks: int = 60,
    proposer: Proposer | None = None,
    kind: type[Engine] = Poisoned,
    **limits: int,
) -> Engine:
    sizes = {"max_num_seqs": 5, "max_num_batched_tokens": 17, "max_model_len": CONTEXT, "block_size": BLOCK}
    config = SchedulerConfig(**sizes | limits, num_blocks=num_blocks, keeps_all=model.keeps_all)
    made = kind(ModelRunner(model, num_blocks, BLOCK), config, None, proposer)
    made.scheduler.kv.worth_saving = lambda: True
    return made


def served(
    engine: Engine,
    prompts: list[list[int]],
    params: list[SamplingParams],
    window: RollingWindow | None = WINDOW,
) -> tuple[list[list[int]], list[list[float]], list[int | None]]:
    """Tokens and their logprobs, and the forgotten tokens, of each prompt."""
    names = [f"generate-{number}" for number in range(len(prompts))]
    tokens: dict[str, list[int]] = {name: [] for name in names}
    scores: dict[str, list[float]] = {name: [] for name in names}
    forgotten: dict[str, int | None] = {}
    for name, prompt, p in zip(names, prompts, params, strict=True):
        engine.add_request(
            EngineRequest(request_id=name, prompt_ids=tuple(prompt), sampling=p, arrival=0.0, rolling=window)
        )
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id] += output.token_ids
            found = [*output.prompt_logprobs, *output.logprobs]
            scores[output.request_id] += [each.logprob for each in found if each.logprob is not None]
            forgotten[output.request_id] = output.num_forgotten
    engine.scheduler.check()
    assert engine.stats().kv_blocks_used == 0
    return [tokens[n] for n in names], [scores[n] for n in names], [forgotten[n] for n in names]


def oracle(model: torch.nn.Module, ids: list[int], rule: Rolling) -> Tensor:
    """Log-probabilities [T, V] after each of ``ids`` by transformers, with explicit positions and mask."""
    count, sinks = len(ids), rule.sinks
    shifts = sorted({rule.forgotten(place) for place in range(count)} - {0})
    tokens = [*ids, *(ids[:sinks] * len(shifts))]
    positions = [*range(count), *(shift + i for shift in shifts for i in range(sinks))]
    seen = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for place in range(count):
        shift = rule.forgotten(place)
        seen[place, shift + sinks if shift else 0 : place + 1] = True
        if shift:
            copy = count + shifts.index(shift) * sinks
            seen[place, copy : copy + sinks] = True
    for copy, i in itertools.product(range(len(shifts)), range(sinks)):
        start = count + copy * sinks
        seen[start + i, start : start + i + 1] = True
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        logits = model(
            torch.tensor([tokens]),
            position_ids=torch.tensor([positions]),
            attention_mask=mask[None, None],
            use_cache=False,
        ).logits[0, :count]
    return logits.log_softmax(-1)


def prompts_of(vocab_size: int) -> list[list[int]]:
    """Prompts shorter and longer than the window, two of which begin alike, and one longer than the context."""
    stem = [(7 * i + 3 * (i // 5)) % vocab_size for i in range(64)]
    return [stem[:5], stem[:33], [*stem[:26], 9, 8], [4], stem[:57]]


SEEDED = [SamplingParams(max_tokens=NEW_TOKENS, temperature=0.8, seed=seed, logprobs=0) for seed in range(5)]


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "smollm3", "deepseek_v3"])
def test_every_token_has_the_probability_that_transformers_gives_it(name: str) -> None:
    """Rotary embedding, of a part of the channels, in every second layer, and of latent attention."""
    model, reference = lower(captured(name)), tiny_model(name)
    prompts = prompts_of(model.vocab_size)
    tokens, scores, forgotten = served(engine(model), prompts, SEEDED)
    for prompt, answer, found, lost in zip(prompts, tokens, scores, forgotten, strict=True):
        assert len(answer) == NEW_TOKENS and len(prompt) + NEW_TOKENS > CONTEXT
        rule = Rolling.of(WINDOW, BLOCK, len(prompt), CONTEXT)
        ids = [*prompt, *answer]
        wanted = oracle(reference, ids[:-1], rule)[len(prompt) - 1 :].gather(
            1, torch.tensor(answer)[:, None]
        )[:, 0]
        assert (torch.tensor(found) - wanted).abs().max() < 2e-4
        assert lost == rule.forgotten(len(ids) - 2) > 0


def test_the_prompt_of_a_long_answer_is_scored_through_the_window() -> None:
    model, reference = lower(captured("llama")), tiny_model("llama")
    prompt = prompts_of(model.vocab_size)[-1] * 2
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    _, (found,), _ = served(engine(model), [prompt], [params])
    rule = Rolling.of(WINDOW, BLOCK, len(prompt), CONTEXT)
    wanted = oracle(reference, prompt[:-1], rule).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert (torch.tensor(found) - wanted).abs().max() < 2e-4


@pytest.mark.parametrize("passes", [("flash_attention",), ("flash_attention", "kv_int8")])
def test_tokens_are_the_same_alone_and_in_company(passes: tuple[str, ...]) -> None:
    """Native kernels, float32 and int8 KV: chunks, preemptions, prefix hits, guesses and company change nothing."""
    graph = captured("llama")
    for each in passes:
        apply(graph, each)
    model, prompts = lower(graph, TARGET), prompts_of(128)
    params = [SamplingParams(max_tokens=NEW_TOKENS, temperature=0.8, seed=seed) for seed in range(5)]
    alone = [
        served(engine(model, max_num_seqs=1, enable_prefix_caching=False), [prompt], [p])[0][0]
        for prompt, p in zip(prompts, params, strict=True)
    ]
    scarce = engine(model, num_blocks=17, kind=Disturbed)
    assert served(scarce, prompts, params)[0] == alone
    assert served(scarce, prompts, params)[0] == alone
    stats = scarce.stats()
    assert stats.num_preemptions > 0 and stats.prefix_cache_hits > 0
    right = {f"generate-{number}": answer for number, answer in enumerate(alone)}
    guessing = engine(model, proposer=HalfRight(right, branches=False))
    assert served(guessing, prompts, params)[0] == alone
    assert sum(guessing.stats().spec_decode_accepted_per_pos) > 50


@needs_native
@pytest.mark.parametrize("passes", [("flash_attention",), ("flash_attention", "kv_int8")])
def test_a_model_that_takes_trees_of_guesses_may_forget(passes: tuple[str, ...]) -> None:
    """The graph of ``--speculative-model suffix``, whose attention reads positions, for their distances alone."""
    graph = captured("llama")
    for each in passes:
        apply(graph, each)
    plain, trees, prompts = lower(graph, TARGET), lower(with_positions(graph), TARGET), prompts_of(128)
    assert trees.keeps_all == ""
    params = [SamplingParams(max_tokens=200, temperature=0.0)] * 5
    speculator = Untimed(Priced(0.001), 12, recycles=True, max_cached_requests=8)
    guessing = engine(trees, proposer=speculator)
    assert served(guessing, prompts, params)[0] == served(engine(plain), prompts, params)[0]
    assert sum(guessing.stats().spec_decode_accepted_per_pos) > 50


@pytest.mark.parametrize("budget", [5, 6, 9])
def test_sinks_fit_the_budget_of_a_step(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests whose windows would move together move one after the other, and no token changes."""
    model, prompt = lower(captured("llama")), prompts_of(128)[0]
    window, params = RollingWindow(6, 4), [SamplingParams(max_tokens=40, temperature=0.0)] * 5
    prompts = [[*prompt, number] for number in range(5)]
    wanted = [served(engine(model), [each], params[:1], window)[0][0] for each in prompts]
    made = engine(model, max_num_batched_tokens=budget)
    sizes, execute = list[int](), made.runner.execute
    monkeypatch.setattr(
        made.runner, "execute", lambda batch: (sizes.append(batch.num_tokens), execute(batch))[1]
    )
    assert served(made, prompts, params, window)[0] == wanted
    assert max(sizes) == budget


def test_a_step_without_room_for_the_sinks_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="sink_tokens must be at most 3"):
        engine(
            lower(captured("llama")),
            max_num_batched_tokens=4,
            max_num_seqs=2,
            rolling_window=6,
            sink_tokens=4,
        )


def test_offloaded_blocks_of_a_forgotten_prompt_come_back() -> None:
    """The store takes what the small pool evicts, and a prompt that others have pushed out is loaded again."""
    model, prompts = lower(captured("llama")), prompts_of(128)
    fresh = engine(model)
    runner = ModelRunner(model, 16, BLOCK)
    config = msgspec.structs.replace(fresh.config, num_blocks=16, num_host_blocks=40)
    made = Engine(runner, config, MemoryBlocks(40, fresh.block_bytes))
    made.scheduler.kv.worth_saving = lambda: True
    for _ in range(2):
        assert served(made, prompts, SEEDED)[0] == served(fresh, prompts, SEEDED)[0]
    assert made.stats().offload_loads > 0


@pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))
def test_sparse_prefill_reads_the_prompt_and_the_window_moves_on() -> None:
    """Blocks of 64 queries choose keys in a prompt within the context; steps behind it have fewer tokens."""
    graph = captured("llama", max_position_embeddings=1024)
    for name, options in (("flash_attention", {}), ("kv_int8", {}), ("sparse_prefill", SPARSE)):
        apply(graph, name, **options)
    model, window = lower(graph, TARGET), RollingWindow(100, 4)
    prompts = [[(7 * i + 3 * (i // 5) + start) % 128 for i in range(640)] for start in range(3)]
    limits = {"max_model_len": 1024, "max_num_batched_tokens": 1024, "num_blocks": 800}
    alone = [served(engine(model, **limits), [p], SEEDED[:1], window)[0][0] for p in prompts]
    together = engine(model, **limits)
    answers, _, forgotten = served(together, prompts, [SEEDED[0]] * 3, window)
    assert answers == alone
    assert forgotten == [Rolling.of(window, BLOCK, 640, 1024).forgotten(640 + NEW_TOKENS - 2)] * 3


@pytest.mark.parametrize("name", ["ttft", "compiled"])
def test_passes_leave_a_model_able_to_forget(name: str) -> None:
    """Fused and compiled operators don't read positions themselves."""
    graph = captured("llama")
    for each in ("fuse_qkv", "flash_attention", *(["compile"] if name == "compiled" else ["kv_int8"])):
        apply(graph, each)
    assert lower(graph, TARGET).keeps_all == ""


def test_blocks_of_the_prompt_that_were_forgotten_serve_others() -> None:
    """The prompt of an answer that has forgotten it is found whole by the next request, which sees all of it."""
    model, prompt = lower(captured("llama")), prompts_of(128)[1]
    fresh, used = engine(model), engine(model)
    params = [SamplingParams(max_tokens=3, temperature=0.0)]
    served(used, [prompt], [SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)])
    before = used.stats().prefix_cache_hits
    assert served(used, [prompt], params, None)[0] == served(fresh, [prompt], params, None)[0]
    assert used.stats().prefix_cache_hits - before == len(prompt) // BLOCK * BLOCK


def test_kv_that_has_forgotten_tokens_is_not_found_by_others() -> None:
    model, prompt = lower(captured("llama")), prompts_of(128)[0]
    greedy = [SamplingParams(max_tokens=30, temperature=0.0)]
    fresh, used = engine(model), engine(model)
    (answer,) = served(used, [prompt], greedy)[0]
    again, params = [*prompt, *answer], [SamplingParams(max_tokens=3, temperature=0.0)]
    before = used.stats().prefix_cache_hits
    assert served(used, [again], params, None)[0] == served(fresh, [again], params, None)[0]
    exact = Rolling.of(WINDOW, BLOCK, len(prompt), CONTEXT).num_exact
    assert used.stats().prefix_cache_hits - before == exact // BLOCK * BLOCK


def test_a_continued_answer_is_the_rest_of_the_undisturbed_one() -> None:
    """After the death of an engine another one computes the answer so far through the window again."""
    model, prompt = lower(captured("llama")), prompts_of(128)[0]
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.8, seed=3)
    (whole,) = served(engine(model), [prompt], [params])[0]
    request = EngineRequest(
        request_id="r",
        prompt_ids=(*prompt, *whole[:41]),
        sampling=params,
        arrival=0.0,
        continued=41,
        rolling=WINDOW,
    )
    other, rest = engine(model), list[int]()
    other.add_request(request)
    while other.has_work:
        for output in other.step():
            rest += output.token_ids
    assert rest == whole[41:]


def test_kv_blocks_stay_constant_after_the_window_is_full() -> None:
    model = lower(captured("llama"))
    made, used = engine(model), list[int]()
    params = SamplingParams(max_tokens=400, temperature=0.0)
    made.add_request(
        EngineRequest(request_id="r", prompt_ids=(5,), sampling=params, arrival=0.0, rolling=WINDOW)
    )
    while made.has_work:
        made.step()
        used.append(made.stats().kv_blocks_used)
    assert set(used[30:-1]) == {-(-(WINDOW.window + WINDOW.sinks + BLOCK - 1) // BLOCK)}
    assert made.config.blocks_needed(1, 400, WINDOW) == max(used)


@pytest.mark.parametrize(
    "name, reason",
    [
        ("gpt2", "reads the positions"),
        ("opt", "reads the positions"),
        ("gemma3_text", "windows or chunks of their own"),
        ("bamba", "recurrent state"),
    ],
)
def test_models_that_need_all_tokens_are_refused_in_a_line(name: str, reason: str) -> None:
    model = lower(captured(name))
    assert reason in model.keeps_all
    config = SchedulerConfig(
        max_num_seqs=2, max_model_len=64, block_size=4, num_blocks=40, keeps_all=model.keeps_all
    )
    with pytest.raises(ValueError, match="can't forget tokens"):
        SchedulerConfig(
            max_num_seqs=2,
            max_model_len=64,
            block_size=4,
            num_blocks=40,
            keeps_all=model.keeps_all,
            rolling_window=8,
        )
    assert "can't forget" in (config.refusal(5, 5, WINDOW) or "")


@pytest.mark.parametrize("name", ["mpt", "bloom"])
def test_models_without_positions_may_forget(name: str) -> None:
    assert lower(captured(name)).keeps_all == ""


@pytest.mark.parametrize(
    "window, what",
    [
        (RollingWindow(10, 5), "sink_tokens must be 0 to 4"),
        (RollingWindow(10, -1), "sink_tokens must be 0 to 4"),
        (RollingWindow(35, 2), "37 tokens together"),
        (RollingWindow(0, 2), "at least 1"),
    ],
)
def test_windows_that_do_not_fit_are_refused(window: RollingWindow, what: str) -> None:
    made = engine(lower(captured("llama")))
    request = EngineRequest(
        request_id="r", prompt_ids=(5,), sampling=SamplingParams(max_tokens=4), arrival=0.0, rolling=window
    )
    with pytest.raises(EngineRefusal, match=what):
        made.add_request(request)


def test_without_sinks_the_window_rolls_alone() -> None:
    model, reference = lower(captured("llama")), tiny_model("llama")
    prompt, window = prompts_of(128)[1], RollingWindow(11, 0)
    (answer,), (found,), _ = served(engine(model), [prompt], SEEDED[:1], window)
    rule = Rolling.of(window, BLOCK, len(prompt), CONTEXT)
    wanted = oracle(reference, [*prompt, *answer][:-1], rule)[len(prompt) - 1 :]
    assert (torch.tensor(found) - wanted.gather(1, torch.tensor(answer)[:, None])[:, 0]).abs().max() < 2e-4
