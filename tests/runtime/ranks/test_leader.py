"""Engines of two processes: the tokens of one, half of the memory each, and the end of all when one ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from optkit.artifact.open import Artifact
from optkit.errors import UserError
from optkit.parallel.stages import Stages
from optkit.recipe.engine_options import engine_options
from optkit.runtime.engine import Engine
from optkit.runtime.factory import open_engine
from optkit.runtime.process.client import EngineClient
from optkit.runtime.ranks.leader import JOIN_SECONDS, RankedRunner
from optkit.runtime.types import EngineLost, EngineRefusal, SamplingParams
from tests.support import quick
from tests.support.engine_process import PATIENCE, request
from tests.support.model_directory import save_model
from tests.support.small_runs import run

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
DRAWN = SamplingParams(max_tokens=12, temperature=1.0, seed=4, top_p=0.9)
RECIPE = """
passes:
  fuse_qkv: {}
  fuse_gate_up: {}
  fuse_add_rms_norm: {}
  select_logits_rows: {}
  flash_attention: {}
  int8: {group_size: 32}
  kv_int8: {}
  tensor_parallel: {size: 2}
"""
PROMPTS = [[5, 6, 7], list(range(3, 60)), list(range(200, 210)), [9]]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in int8 that says it is shared by two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPTKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        quick.quick(patch.setattr)
        source = save_model(tmp_path_factory.mktemp("models") / "tiny", intermediate_size=128)
        out = tmp_path_factory.mktemp("artifacts") / "shared"
        record = run(source, out, RECIPE)
    made = record.passes[-1]
    assert made.decision == "kept" and made.stats["logit error"] == 0.0
    return out


@pytest.fixture(scope="module")
def ranks(artifact: Path) -> Iterator[Engine]:
    engine = open_engine(str(artifact), threads=1)
    yield engine
    runner_of(engine).ranks.close()


def runner_of(engine: Engine) -> RankedRunner:
    assert isinstance(engine.runner, RankedRunner)
    return engine.runner


def test_two_processes_give_the_tokens_of_one(artifact: Path, ranks: Engine) -> None:
    alone = open_engine(str(artifact), tensor_parallel_size=1, threads=1)
    for sampling in (GREEDY, DRAWN):
        assert ranks.generate(PROMPTS, sampling) == alone.generate(PROMPTS, sampling)
        assert ranks.generate(PROMPTS[:2], sampling) == alone.generate(
            PROMPTS[:2], sampling
        )  # cached prefixes
    assert ranks.info().num_ranks == 2 and alone.info().num_ranks == 1
    assert ranks.config.num_blocks == alone.config.num_blocks


def test_a_rank_has_half_of_the_kv_and_its_part_of_the_weights(artifact: Path, ranks: Engine) -> None:
    runner = runner_of(ranks)
    (own,) = {pool.shape[2] for pool in runner.kv_pools.values()}
    (whole,) = {spec.num_kv_heads for spec in Artifact.open(artifact).graph().meta.kv_specs}
    assert 2 * own == whole
    assert runner.model.weight_bytes < 0.6 * runner.weight_bytes


def test_what_needs_one_process_is_refused(artifact: Path, ranks: Engine) -> None:
    with pytest.raises(EngineRefusal, match="engines of one rank"):
        ranks.embed([[1, 2, 3]], "mean")
    with pytest.raises(UserError, match="ranks do not offload KV"):
        open_engine(str(artifact), kv_offload_bytes=1 << 20)
    with pytest.raises(
        UserError, match=r"--tensor-parallel-size: 3 ranks can't share 2 KV heads.*work: 1, 2"
    ):
        open_engine(str(artifact), tensor_parallel_size=3)


def test_a_cancelled_step_runs_to_its_end_in_all_ranks(ranks: Engine) -> None:
    first = ranks.generate(PROMPTS, GREEDY)
    ranks.departed = lambda: {f"generate-{number}" for number in range(10_000)}
    try:
        assert ranks.generate(PROMPTS, GREEDY) == first
    finally:
        ranks.departed = frozenset


def test_the_end_of_a_rank_is_the_end_of_the_engine(artifact: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = open_engine(str(artifact), threads=1)
    ranks = runner_of(engine).ranks
    os.kill(ranks.processes[0].pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(EngineLost, match="rank 1 ended with code -9"), caplog.at_level(logging.CRITICAL):
        while time.monotonic() - start < PATIENCE:
            engine.alive()
            time.sleep(0.01)
    with pytest.raises(EngineLost), caplog.at_level(logging.CRITICAL):
        engine.generate([[1, 2]], GREEDY)
    ranks.close()


def test_a_rank_that_dies_in_a_step_ends_the_engine_process(artifact: Path) -> None:
    async def scenario() -> None:
        engine = EngineClient(str(artifact), engine_options(Artifact.open(artifact).recipe, {"threads": 1}))
        await engine.start()
        try:
            children = psutil.Process(engine.pid).children()
            (rank,) = [c for c in children if "optkit.runtime.ranks.follower" in " ".join(c.cmdline())]
            outputs = engine.generate(request("long", [5] * 20, max_tokens=400))
            first = await anext(outputs)
            assert first.token_ids
            rank.kill()
            rest = [output async for output in outputs]
            assert rest[-1].error == "the engine died"
        finally:
            await engine.stop()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE))


# -- stages ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stages(artifact: Path) -> Iterator[Engine]:
    engine = open_engine(str(artifact), tensor_parallel_size=1, pipeline_parallel_size=2, threads=1)
    yield engine
    runner_of(engine).ranks.close()


def test_two_stages_give_the_tokens_of_one_process(artifact: Path, stages: Engine) -> None:
    alone = open_engine(str(artifact), tensor_parallel_size=1, threads=1)
    for sampling in (GREEDY, DRAWN):
        assert stages.generate(PROMPTS, sampling) == alone.generate(PROMPTS, sampling)
        assert stages.generate(PROMPTS[:2], sampling) == alone.generate(PROMPTS[:2], sampling)
    assert stages.info().num_ranks == 2
    assert stages.config.num_blocks == alone.config.num_blocks


def test_a_stage_has_the_weights_and_the_kv_of_its_layers(artifact: Path, stages: Engine) -> None:
    runner, whole = runner_of(stages), Artifact.open(artifact).graph().meta.kv_specs
    names = {name for spec in runner.model.kv_specs for name in spec.inputs}
    assert set(runner.kv_pools) == names and len(runner.model.kv_specs) == len(whole) / 2
    assert runner.model.weight_bytes < 0.7 * runner.weight_bytes
    own = sum(pool.nbytes for pool in runner.kv_pools.values())
    assert runner.kv_bytes == pytest.approx(2 * own, rel=0.01)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float model of four layers, of which some have a window."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPTKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        quick.quick(patch.setattr)
        folder = tmp_path_factory.mktemp("models") / "windowed"
        source = save_model(folder, "gemma2", num_hidden_layers=4, sliding_window=8)
        run(
            source,
            out := tmp_path_factory.mktemp("artifacts") / "windowed",
            "passes:\n  flash_attention: {}\n",
        )
    return out


def test_three_stages_of_a_float_model_with_windows_give_the_tokens_of_one_process(
    windowed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone = open_engine(str(windowed), threads=1)
    with caplog.at_level(logging.INFO):
        engine = open_engine(str(windowed), pipeline_parallel_size=3, threads=1)
    assert "layers with a window keep the KV of all tokens: the stages" in caplog.text
    try:
        for _ in range(2):  # the second time with cached prefixes
            assert engine.generate(PROMPTS, GREEDY) == alone.generate(PROMPTS, GREEDY)
    finally:
        runner_of(engine).ranks.close()


def test_a_stage_that_dies_in_a_step_ends_the_engine(
    windowed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 1 of 3, while the others wait for it or compute."""
    engine = open_engine(str(windowed), pipeline_parallel_size=3, threads=1)
    ranks = runner_of(engine).ranks
    killer = threading.Timer(0.2, os.kill, (ranks.processes[0].pid, signal.SIGKILL))
    killer.start()
    endless = msgspec.structs.replace(GREEDY, max_tokens=200)
    try:
        with pytest.raises(EngineLost, match="rank"), caplog.at_level(logging.CRITICAL):
            for _ in range(1000):
                engine.generate(PROMPTS, endless)
        assert ranks.lost == "rank 1 ended with code -9"
    finally:
        start = time.monotonic()
        ranks.close()
        assert time.monotonic() - start < JOIN_SECONDS  # nobody waits for the lost rank


def test_a_model_that_can_not_be_cut_is_refused_by_the_flag_with_the_sizes_that_work(
    windowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stages, "places", lambda self, pools: [])
    with pytest.raises(UserError, match=r"--pipeline-parallel-size: .*2 stages.*sizes that work: 1"):
        open_engine(str(windowed), pipeline_parallel_size=2, threads=1)
