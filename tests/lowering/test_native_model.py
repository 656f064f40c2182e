"""Models of native calls alone, made from a lowered model or read from a file: the bits of the lowered model, without
torch; and what native code must never be given.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from optkit.graph.ir import Graph
from optkit.kernels.cpu import native
from optkit.lowering.native_model import NativeModel
from optkit.lowering.to_native import to_native
from optkit.runtime.embedding import Embedder
from optkit.runtime.engine import Engine
from optkit.runtime.hidden_graph import hidden_graph
from optkit.runtime.kv.pools import HostPools
from optkit.runtime.runner import ModelRunner
from optkit.runtime.saving import save_model
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.types import SamplingParams
from tests.support import tiny_runtime
from tests.support.graphs import apply, captured
from tests.support.saved import KEY, GraphArtifact, saved

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))
SAMPLED = SamplingParams(max_tokens=9, temperature=0.9, top_p=0.9, seed=3, logprobs=2)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))


def int4_for_few(graph: Graph) -> Graph:
    """``graph`` with int4 layers in steps of up to 4 tokens."""
    apply(graph, "w4a8", group_size=32, max_tokens=4)
    return graph


def int8(graph: Graph, **options: object) -> Graph:
    """``graph`` with int8 layers."""
    for each in ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm"):
        apply(graph, each)
    apply(graph, "int8", group_size=32, lm_head=True, weight_only=["lm_head"], **options)
    apply(graph, "flash_attention")
    return graph


GRAPHS = {
    "llama": tiny_runtime.int8_graph,
    "windows": lambda: int8(
        captured("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1)
    ),
    "scaled embedding": lambda: int8(captured("gemma3_text")),
    "scaled logits": lambda: int8(captured("granite", logits_scaling=8.0)),
    "variants": lambda: int8(int4_for_few(captured("llama"))),
}


def engine(model: object) -> Engine:
    limits = tiny_runtime.LIMITS | {"max_num_batched_tokens": 24}
    config = SchedulerConfig(**limits)
    return Engine(ModelRunner(model, config.num_blocks, config.block_size), config)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", GRAPHS)
def test_tokens_and_logprobs_are_those_of_the_lowered_model(kind: str) -> None:
    """Chunks, decodes and batches of both, each by the engine."""
    model, found = saved(GRAPHS[kind]())
    prompts = tiny_runtime.prompts(9)
    expected = engine(model).generate(prompts, SAMPLED)
    for made in (to_native(model), found.model):
        assert isinstance(made, NativeModel)
        assert engine(made).generate(prompts, SAMPLED) == expected
        assert made.weight_bytes == model.weight_bytes and made.variant_limits == model.variant_limits
        assert made.workspace_bytes(64, 3) == model.workspace_bytes(64, 3)
        assert tuple(made.states) == tuple(model.states) and made.keeps_all == model.keeps_all


@pytest.mark.parametrize("kind", ["llama", "variants"])
def test_weights_live_as_long_as_the_model(kind: str) -> None:
    """Packed weights: the tests' cache of graphs keeps the others."""
    lowered = GraphArtifact(GRAPHS[kind]()).executable()
    constants = [t for each in lowered.variants for program in each.programs for t in program.constants]
    packed = [weakref.ref(tensor) for tensor in constants if tensor.dtype is torch.uint8]
    made = to_native(lowered)
    assert made is not None and packed
    del lowered, constants
    gc.collect()
    assert all(weight() is not None for weight in packed)
    del made
    gc.collect()
    assert all(weight() is None for weight in packed)


def test_variants_share_their_working_memory() -> None:
    """Steps run in turn. A model without the head, for embeddings, runs between the steps and has its own."""
    model, found = saved(GRAPHS["variants"]())
    arenas = []
    for each in (to_native(model), found.model, found.hidden):
        assert each is not None and len(each.variants) == 2
        (arena,) = {variant.calls.arena for variant in each.variants}
        arenas.append(arena)
    assert len(set(arenas)) == 3


def test_logits_have_the_same_bits() -> None:
    model, found = saved(tiny_runtime.int8_graph())
    rows = []
    for each in (model, found.model, to_native(model)):
        made, kept = engine(each), []
        execute = made.runner.execute
        made.runner.execute = lambda batch, execute=execute, kept=kept: (
            kept.append(execute(batch)) or kept[-1]
        )
        made.generate(tiny_runtime.prompts(5), SAMPLED)
        rows.append(kept)
    assert len(rows[0]) > 9
    for first, *others in zip(*rows, strict=True):
        assert all(np.array_equal(first, other) for other in others)


def test_vectors_are_those_of_the_lowered_graph_without_the_head() -> None:
    graph = tiny_runtime.int8_graph()
    _, found = saved(graph)
    assert found.hidden is not None
    lowered = GraphArtifact(graph).executable(change=hidden_graph)
    prompts = tiny_runtime.prompts(6)
    expected, given = (Embedder(each, 8, 64).embed(prompts, "mean") for each in (lowered, found.hidden))
    assert np.array_equal(expected, given)


def test_a_float_model_is_neither_native_nor_saved() -> None:
    artifact = GraphArtifact(captured("llama"))
    assert to_native(artifact.executable()) is None
    assert not save_model(artifact, artifact.executable(), artifact.shared)  # type: ignore[arg-type]


def test_a_model_of_a_plug_in_is_not_saved() -> None:
    artifact = GraphArtifact(tiny_runtime.int8_graph(), plugins={"own": {"package": "own"}})
    assert not save_model(artifact, artifact.executable(), artifact.shared)  # type: ignore[arg-type]


def test_pools_of_other_shapes_are_refused() -> None:
    _, found = saved(tiny_runtime.int8_graph())
    runner = engine(found.model).runner
    name = next(iter(runner.kv_pools))
    for wrong in (
        runner.kv_pools[name][..., :-1],
        runner.kv_pools[name].view(np.uint8),
        runner.kv_pools[name][:, ::2],
        runner.kv_pools[name][:-1],
    ):
        with pytest.raises(ValueError, match=f"the pool {name} is"):
            found.model.step_on(runner.kv_pools | {name: wrong})


def test_inputs_of_other_types_are_refused() -> None:
    _, found = saved(tiny_runtime.int8_graph())
    pools = HostPools(ModelRunner(found.model, 4, 8).layout, found.model.states, 4, 8)
    step = found.model.step_on(pools.kv)
    arrays = {name: np.zeros(1, dtype) for name, dtype in found.model.dtypes.items()}
    arrays |= {"query_start": np.array([0, 1], np.int32), "seq_lens": np.ones(1, np.int32)}
    arrays["block_tables"] = np.zeros((1, 1), np.int32)
    assert step(arrays).shape == (1, found.model.vocab_size)
    with pytest.raises(ValueError, match="input_ids must be dense int64"):
        step(arrays | {"input_ids": np.zeros(1, np.int32)})
    with pytest.raises(ValueError, match="positions must be dense int64"):
        step(arrays | {"positions": np.zeros(4, np.int64)[::2]})
    with pytest.raises(IndexError, match="out of range"):
        step(arrays | {"input_ids": np.full(1, found.model.vocab_size, np.int64)})


@pytest.mark.parametrize(
    "module", ["optkit.runtime.factory", "optkit.runtime.process.worker", "optkit.profiling.recording"]
)
def test_the_engine_process_is_imported_without_torch(module: str) -> None:
    script = f"import sys; sys.modules['torch'] = None; import {module}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr


def test_a_saved_model_runs_where_torch_can_not_be_imported() -> None:
    """In a process of its own: the engine, a request with penalties and logprobs, and an embedding."""
    saved(tiny_runtime.int8_graph())
    script = f"""
import sys
sys.modules["torch"] = None
from optkit.lowering import saved_file
from optkit.runtime.embedding import Embedder
from optkit.runtime.engine import Engine
from optkit.runtime.runner import ModelRunner
from optkit.runtime.saving import save_model
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.types import SamplingParams
found = saved_file.read({KEY!r})
config = SchedulerConfig(**{tiny_runtime.LIMITS!r})
engine = Engine(ModelRunner(found.model, config.num_blocks, config.block_size), config)
params = SamplingParams(max_tokens=5, temperature=0.8, seed=1, logprobs=2, repetition_penalty=1.2, prompt_logprobs=1)
print(engine.generate([[5, 6, 7], [9]], params))
print(Embedder(found.hidden, 8, 64).embed([[5, 6, 7]], "last").shape)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    params = SamplingParams(
        max_tokens=5, temperature=0.8, seed=1, logprobs=2, repetition_penalty=1.2, prompt_logprobs=1
    )
    expected = tiny_runtime.engine().generate([[5, 6, 7], [9]], params)
    assert done.stdout.splitlines()[0] == str(expected)
    assert torch.get_num_threads() == 1
