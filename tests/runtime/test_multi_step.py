"""Several decode steps in a call: the tokens of single steps, whatever comes in between, sent as they come."""

from __future__ import annotations

import functools
import itertools
import os
import random
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

import numpy as np
import pytest

from optkit.graph.ir import Graph
from optkit.graph.kv_layout import kv_layout
from optkit.kernels.cpu import native
from optkit.kernels.cpu.decode_steps import Choice, Outlet, TokenPairs
from optkit.lowering.native_model import NativeModel
from optkit.runtime.engine import Engine
from optkit.runtime.multi_step import ANY_TOKEN, MAX_STEPS
from optkit.runtime.process import ipc
from optkit.runtime.runner import ModelRunner
from optkit.runtime.sampling.tree_speculator import TreeSpeculator
from optkit.runtime.scheduling.cost_model import CostModel
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.types import Batch, EngineRequest, FinishReason, SamplingParams, TokenOutput
from tests.support import tiny_runtime
from tests.support.fakes import FakeRunner
from tests.support.graphs import apply, captured
from tests.support.histories import MAX_LEN, VOCAB, reference, some_socket
from tests.support.saved import saved

needs_native = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))
Texts = dict[str, list[int]]


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPTKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def windowed() -> Graph:
    """Two groups of layers, one with a window of 16 tokens, and the formats of ``tiny_runtime.int8_graph``."""
    graph = captured("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1)
    for name in ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm"):
        apply(graph, name)
    apply(graph, "int8", group_size=32, lm_head=True, weight_only=["lm_head"])
    apply(graph, "flash_attention")
    apply(graph, "kv_int8")
    return graph


GRAPHS: dict[str, Callable[[], Graph]] = {"llama": tiny_runtime.int8_graph, "windows": windowed}


@functools.cache
def model_of(kind: str) -> NativeModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPTKIT_CACHE", f"{os.environ['OPTKIT_CACHE']}/{kind}")
        return saved(GRAPHS[kind]())[1].model


def saved_engine(kind: str, **limits: object) -> Engine:
    """A new engine on native calls alone."""
    model = model_of(kind)
    layout = kv_layout(model.states)
    config = SchedulerConfig(**tiny_runtime.LIMITS | {"kv_windows": layout.windows} | limits)
    return Engine(ModelRunner(model, config.num_blocks, config.block_size, layout=layout), config)


def params(dice: random.Random, vocab: int) -> SamplingParams:
    """Mostly parameters that several steps allow, at times others."""
    return SamplingParams(
        max_tokens=dice.choice((1, 2, 7, 20, 60)),
        temperature=dice.choice((0.0, 0.8)),
        top_p=dice.choice((1.0, 0.9)),
        top_k=dice.choice((0, 9)),
        seed=dice.randrange(5),
        min_tokens=dice.choice((0, 0, 3)),
        stop_token_ids=tuple(dice.sample(range(vocab), dice.choice((0, 0, 3)))),
        repetition_penalty=dice.choice((1.0,) * 9 + (1.3,)),
        logprobs=dice.choice((None,) * 9 + (1,)),
    )


def request(dice: random.Random, number: int, vocab: int, longest: int) -> EngineRequest:
    prompt = tuple(dice.randrange(vocab) for _ in range(dice.randint(1, longest)))
    return EngineRequest(
        request_id=f"r{number}é", prompt_ids=prompt, sampling=params(dice, vocab), arrival=0.0
    )


def outputs_of(frames: bytes) -> list[TokenOutput]:
    """The outputs in some frames."""
    found = list[TokenOutput]()
    while frames:
        end = ipc.HEADER.size + ipc.body_length(frames[: ipc.HEADER.size])
        outputs = ipc.from_worker.decode(frames[ipc.HEADER.size : end])
        assert isinstance(outputs, tuple)
        found += outputs
        frames = frames[end:]
    return found


def counted(runner: FakeRunner | ModelRunner) -> list[int]:
    """The numbers of steps in the calls of ``runner.decode`` from now on."""
    counts, decode = list[int](), runner.decode

    def wrapper(*args: object) -> np.ndarray:
        tokens = decode(*args)  # type: ignore[arg-type]
        counts.append(len(tokens))
        return tokens

    runner.decode = wrapper  # type: ignore[method-assign]
    return counts


def take(texts: Texts, outputs: Sequence[TokenOutput]) -> None:
    for output in outputs:
        assert len(output.token_ids) <= 1 and output.error is None
        texts[output.request_id] += output.token_ids


@pytest.mark.parametrize("group", range(6))
def test_answers_are_those_of_the_reference_under_random_histories(group: int) -> None:
    """Arrivals, aborts and preemptions between calls; blocks are few in half of the histories."""
    counts = [count for seed in range(10) for count in history(random.Random(10 * group + seed))]
    assert sum(count > 1 for count in counts) > 20


def history(dice: random.Random) -> list[int]:
    """Compare the answers of a random history; the numbers of steps in a call."""
    size, windows = dice.choice((1, 3, 4)), dice.choice(((0,), (0,), (0, 3)))
    blocks = dice.choice((2, 6)) * (MAX_LEN // size + 1) * len(windows)
    config = SchedulerConfig(
        max_num_seqs=3, max_num_batched_tokens=12, max_model_len=MAX_LEN, block_size=size, num_blocks=blocks,
        enable_prefix_caching=dice.random() < 0.5, kv_windows=windows,
    )  # fmt: skip
    runner = FakeRunner(blocks, size, VOCAB, windows=windows, multi_step=True)
    engine = Engine(runner, config)
    sends, counts = dice.random() < 0.5, counted(runner)
    if sends:
        engine.make_outlet = some_socket
    texts: Texts = {}
    asked: dict[str, EngineRequest] = {}
    over: dict[str, FinishReason] = {}
    for turn in range(150):
        if turn < 100 and dice.random() < 0.15:
            new = request(dice, turn, VOCAB, 6)
            engine.add_request(new)
            asked[new.request_id], texts[new.request_id] = new, []
        if engine.scheduler.running and dice.random() < 0.02:
            engine.scheduler.preempt(dice.choice(engine.scheduler.running))
        if engine.scheduler.running and dice.random() < 0.02:
            gone = dice.choice(engine.scheduler.running).request_id
            engine.abort(gone)
            del asked[gone]
        outputs = engine.step()
        sent = outputs_of(b"".join(runner.sent))
        runner.sent.clear()
        assert not sent or sends
        take(texts, [*sent, *outputs])
        over |= {output.request_id: output.finish_reason for output in outputs if output.finish_reason}
        engine.scheduler.check()
    assert not engine.has_work and engine.stats().kv_blocks_used == 0
    for name, each in asked.items():
        assert (texts[name], over[name]) == reference(each)
    return counts


class Pipe:
    """A socket pair in the place of the one to the parent process, with messages of the parent at random times."""

    def __init__(self, dice: random.Random) -> None:
        self.parent, self.worker = socket.socketpair()
        self.dice, self.longest = dice, 0

    def outlet(self, outputs: Sequence[TokenOutput]) -> Outlet:
        if self.dice.random() < 0.2:
            self.parent.send(b"arrived")
        descriptor = self.worker.fileno()
        return Outlet((descriptor,), descriptor, *ipc.frame_with_places(tuple(outputs), ANY_TOKEN))

    def has_news(self) -> bool:
        """True, once, after a message of the parent."""
        self.worker.setblocking(False)
        try:
            return bool(self.worker.recv(1000))
        except BlockingIOError:
            return False
        finally:
            self.worker.setblocking(True)

    def received(self) -> list[TokenOutput]:
        self.parent.setblocking(False)
        try:
            return outputs_of(self.parent.recv(1 << 20))
        except BlockingIOError:
            return []
        finally:
            self.parent.setblocking(True)


def answers(kind: str, seed: int, multi_step: bool, guesses: bool = False) -> tuple[Texts, list[int]]:
    """The answers to random requests at random times by a saved model, and the numbers of steps in a call."""
    dice = random.Random(seed)
    engine = saved_engine(kind, max_num_seqs=4, num_blocks=64)
    runner = cast(ModelRunner, engine.runner)
    counts = counted(runner)
    if guesses:
        sources = {"recycles": True, "max_cached_requests": 8}
        engine.scheduler.proposer = TreeSpeculator(CostModel(), 8, branches=False, **sources)
    pipe, texts = Pipe(random.Random(seed)), Texts()
    engine.make_outlet = pipe.outlet
    runner.is_multi_step = multi_step
    waiting = [request(dice, number, 128, 40) for number in range(12)]
    while waiting or engine.has_work:
        if waiting and (pipe.has_news() or not engine.has_work or dice.random() < 0.1):
            new = waiting.pop()
            engine.add_request(new)
            texts[new.request_id] = []
        outputs = engine.step()
        take(texts, [*pipe.received(), *outputs])
        engine.scheduler.check()
    pipe.parent.close()
    pipe.worker.close()
    return texts, counts


@needs_native
@pytest.mark.parametrize("kind", GRAPHS)
@pytest.mark.parametrize("seed", range(4))
def test_native_steps_give_the_tokens_of_single_steps(kind: str, seed: int) -> None:
    many, counts = answers(kind, seed, multi_step=True)
    single, none = answers(kind, seed, multi_step=False)
    assert many == single and not none
    assert max(counts) > 3 and len(set(counts)) > 2


@needs_native
def test_native_steps_between_guesses_give_the_tokens_of_single_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends, decode = (
        list[list[bool]](),
        ModelRunner.decode,
    )  # for the steps of each call: a watched pair was the last

    def noted(runner: ModelRunner, batch: Batch, choice: Choice, outlet: Outlet) -> np.ndarray:
        tokens = decode(runner, batch, choice, outlet)
        if any(choice.pairs):
            before = [item.request.token_ids[-1] for item in batch.items]
            steps = itertools.pairwise([before, *tokens.tolist()])
            ends.append([is_watched(zip(*step, strict=True), choice.pairs) for step in steps])
        return tokens

    monkeypatch.setattr(ModelRunner, "decode", noted)
    for seed in range(4):
        single, _ = answers("llama", seed, multi_step=False)
        many, _ = answers("llama", seed, multi_step=True, guesses=True)
        assert many == single
    assert any(len(call) > 1 and call[-1] for call in ends)
    assert not any(any(call[:-1]) for call in ends)


def is_watched(pairs: Iterable[tuple[int, int]], sets: Sequence[Sequence[TokenPairs]]) -> bool:
    """True where the pair of a sequence is in one of its sets."""
    return any(pair in each for pair, its in zip(pairs, sets, strict=True) for each in its)


@needs_native
def test_steps_end_when_another_request_arrives_and_its_wait_is_one_step() -> None:
    """The descriptor can be read from the beginning: one step, whose tokens come with the outputs."""
    engine = saved_engine("llama")
    parent, worker = socket.socketpair()
    descriptor = worker.fileno()
    engine.make_outlet = lambda outputs: Outlet(
        (descriptor,), descriptor, *ipc.frame_with_places(tuple(outputs), ANY_TOKEN)
    )
    with parent, worker:
        engine.add_request(
            EngineRequest(
                request_id="r", prompt_ids=(5, 6), sampling=SamplingParams(max_tokens=100), arrival=0.0
            )
        )
        assert len(engine.step()) == 1  # the prompt
        parent.send(b"x")
        assert len(engine.step()) == 1
        worker.recv(1)
        assert len(engine.step()) == 1
        frames = outputs_of(parent.recv(1 << 20))
        assert 1 < len(frames) + 1 <= MAX_STEPS
        assert all(len(output.token_ids) == 1 for output in frames)
        held = engine.scheduler.running[0]
        assert held.num_output == 3 + len(frames)
        assert held.output_ids[2:-1] == [token for output in frames for token in output.token_ids]


@needs_native
def test_a_parent_that_is_gone_ends_the_steps() -> None:
    engine = saved_engine("llama")
    parent, worker = socket.socketpair()
    engine.make_outlet = lambda outputs: Outlet(
        (), worker.fileno(), *ipc.frame_with_places(tuple(outputs), ANY_TOKEN)
    )
    sampling = SamplingParams(max_tokens=100)
    engine.add_request(EngineRequest(request_id="r", prompt_ids=(5, 6), sampling=sampling, arrival=0.0))
    engine.step()
    parent.close()
    with worker:
        assert len(engine.step()) == 1
        assert engine.scheduler.running[0].num_output == 2
