"""Loading an engine: the draft model of another artifact, and the KV cache of a GPU, which gets what is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from optkit.errors import UserError
from optkit.graph.kv_layout import one_group
from optkit.lowering.lower import lower
from optkit.recipe.engine_options import engine_options
from optkit.recipe.load import load_recipe
from optkit.runtime import factory
from optkit.runtime.cuda.device import HostDevice
from optkit.runtime.engine import Engine
from optkit.runtime.runner import ModelRunner
from optkit.runtime.sampling.proposer import Speculator
from optkit.runtime.scheduling.cost_model import CostModel
from optkit.runtime.types import SamplingParams
from tests.support.graphs import captured
from tests.support.recurrent_model import RecurrentModel

RECIPE = load_recipe(
    "ttft-h100", ["target=cpu", "runtime.max_num_batched_tokens=32", "runtime.max_num_seqs=4"]
)
VOCABULARIES = {"wide": 192}  # by the artifact's name; others have 128 ids
FREE, DRAFT_BYTES, DRAFT_STEP = 700 << 20, 100 << 20, 3 << 20


class Shelf:
    """Artifacts without files but a tokenizer, by their directories, and a GPU that their models take memory of."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.loaded = folder, list[str]()

    def put(self, name: str, tokenizer: str | None = "{}") -> str:
        directory = self.folder / name
        directory.mkdir()
        if tokenizer is not None:
            (directory / "tokenizer.json").write_text(tokenizer)
        return str(directory)

    def open(self, directory: str, *, verify: bool = True) -> Any:
        name = Path(directory).name
        vocab_size = VOCABULARIES.get(name, 128)

        def executable(**options: Any) -> Any:
            self.loaded.append(name)
            return lower(captured("llama", vocab_size=vocab_size))

        here = Path(directory)
        return SimpleNamespace(
            directory=here,
            recipe=RECIPE,
            executable=executable,
            native=here / "native",
            manifest={"plugins": {"own": {}}},
        )


class GPU(HostDevice):
    """Has less memory free when a second model is loaded, and counts the steps it profiles."""

    def __init__(self, shelf: Shelf) -> None:
        super().__init__()
        self.shelf, self.profiled = shelf, 0

    def free_memory(self) -> tuple[int, int]:
        return FREE - DRAFT_BYTES * (len(self.shelf.loaded) - 1), 1 << 30

    def peak_bytes(self, step: Callable[[], Any]) -> int:
        step()
        self.profiled += 1
        return DRAFT_STEP if self.profiled < len(self.shelf.loaded) else 0  # the draft model's comes first


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    made = Shelf(tmp_path)
    monkeypatch.setattr(factory, "Artifact", made)
    return made


def blocks_on_a_gpu(shelf: Shelf, monkeypatch: pytest.MonkeyPatch, directory: str, **given: Any) -> int:
    """The blocks in the pool of an engine on ``GPU``."""
    found: list[int] = []
    shelf.loaded.clear()

    def make_engine(model: Any, config: Any, gpu: Any, *rest: Any) -> Any:
        assert isinstance(gpu, GPU)
        found.append(config.num_blocks)
        raise Made

    gpu = GPU(shelf)
    options = msgspec.structs.replace(engine_options(RECIPE, given), kv_cache_bytes=None)
    monkeypatch.setattr(factory, "device_of", lambda model: gpu)
    monkeypatch.setattr(factory, "make_engine", make_engine)
    with pytest.raises(Made):
        factory.load_engine(directory, options)
    return found[0]


class Made(Exception):
    """The engine would be made now."""


def test_kv_cache_gets_what_a_draft_model_leaves(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lower(captured("llama"))
    block = one_group(model.states).block_bytes(RECIPE.runtime.block_size)
    large, small = shelf.put("large"), shelf.put("small")
    drafted = blocks_on_a_gpu(shelf, monkeypatch, large, speculative_model=small)
    plain = blocks_on_a_gpu(shelf, monkeypatch, large)
    assert plain - drafted == pytest.approx((DRAFT_BYTES + DRAFT_STEP) / block, abs=1)


def answers(engine: Engine) -> list[list[int]]:
    return engine.generate([[3, 4, 5], [100, 101]], SamplingParams(max_tokens=12, temperature=0.0))


def test_a_draft_model_of_a_padded_vocabulary_is_used(shelf: Shelf) -> None:
    large, wide = shelf.put("large"), shelf.put("wide")
    engine = factory.open_engine(large, speculative_model=wide, kv_cache_bytes=1 << 20)
    proposer = engine.scheduler.proposer
    assert isinstance(proposer, Speculator) and proposer.source.num_shared_ids == 128
    proposer.lengths.choose = lambda sequences, seconds: [3] * len(sequences)
    assert answers(engine) == answers(factory.open_engine(large, kv_cache_bytes=1 << 20))
    assert proposer.stats.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("tokenizer", "message"), [('{"a": 1}', "another tokenizer"), (None, r"no tokenizer\.json")]
)
def test_a_draft_model_needs_the_same_tokenizer(shelf: Shelf, tokenizer: str | None, message: str) -> None:
    large, small = shelf.put("large"), shelf.put("small", tokenizer)
    with pytest.raises(UserError, match=message) as error:
        factory.open_engine(large, speculative_model=small, kv_cache_bytes=1 << 20)
    assert error.value.where == small and "ngram" in error.value.fix


def test_the_largest_step_of_a_draft_model_leaves_nothing_behind(shelf: Shelf) -> None:
    artifact = shelf.open(shelf.put("large"))
    draft = factory.draft_model(artifact, shelf.put("small"), 128)
    steps: list[tuple[int, int]] = []
    execute = draft.runner.execute
    draft.runner.execute = lambda batch: steps.append((len(batch.items), batch.num_tokens)) or execute(batch)
    for count in (1, 4, 100):
        draft.run_largest(count)
    assert steps == [(1, 32), (4, 32), (32, 32)]
    assert draft.blocks.num_used == 0
    draft.blocks.check([])


# -- recurrent states --------------------------------------------------------------------------------------


def recurrent_config(hybrid: bool, **given: Any) -> Any:
    return factory.scheduler_config(RecurrentModel(hybrid), engine_options(None, given))


STATE = 4 * (8 * 8 + 8 * 2)  # bytes of a sequence's states


def test_recurrent_model_gets_a_slot_a_request_and_checkpoints_within_its_share() -> None:
    config = recurrent_config(hybrid=True, kv_cache_bytes=1 << 16, max_num_seqs=3)
    assert (config.num_state_slots, config.num_checkpoints) == (3, (1 << 14) // STATE)
    assert recurrent_config(True, kv_cache_bytes=1 << 16, state_checkpoints=7).num_checkpoints == 7
    assert recurrent_config(True, kv_cache_bytes=1 << 16, enable_prefix_caching=False).num_checkpoints == 0
    few = {"kv_cache_bytes": 1 << 12, "max_num_seqs": 1, "block_size": 8}
    assert recurrent_config(True, **few).num_checkpoints == 4  # the fewest


@pytest.mark.parametrize("checkpoints", [None, 0, 7])
@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("total", [1 << 14, 1 << 16, 1 << 18])
def test_blocks_slots_and_checkpoints_fit_the_bytes_of_the_cache(
    hybrid: bool, checkpoints: int | None, total: int
) -> None:
    given = {"kv_cache_bytes": total, "state_checkpoints": checkpoints, "max_num_seqs": 64, "block_size": 8}
    config = recurrent_config(hybrid, **given)
    model = RecurrentModel(hybrid)
    runner = ModelRunner(
        model, config.num_blocks, 8, num_slots=config.num_state_slots + config.num_checkpoints
    )
    assert 0.9 * total * (hybrid or checkpoints is None) < runner.kv_bytes + runner.state_bytes <= total
    assert config.num_state_slots == config.max_num_seqs


def test_fewer_requests_run_when_the_cache_has_no_room_for_their_states(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = recurrent_config(True, kv_cache_bytes=1 << 14, max_num_seqs=64, block_size=8)
    assert config.max_num_seqs == config.num_state_slots == (1 << 13) // STATE
    assert "25 of 64 requests (max_num_seqs) run at once" in caplog.text


def test_cache_without_room_for_states_and_blocks_is_refused() -> None:
    with pytest.raises(UserError, match="3 recurrent states and 8 checkpoints and two blocks") as error:
        recurrent_config(True, kv_cache_bytes=1 << 11, max_num_seqs=64, state_checkpoints=8)
    assert error.value.where == "kv_cache_bytes"


def test_model_without_attention_gets_blocks_for_all_its_requests() -> None:
    config = recurrent_config(hybrid=False, max_num_seqs=3, state_checkpoints=2, block_size=32)
    assert config.num_blocks == (3 + 2) * 3 and config.max_model_len == 96


def test_offload_and_speculation_are_refused_when_the_model_is_recurrent() -> None:
    model = RecurrentModel()
    config = recurrent_config(hybrid=True)
    with pytest.raises(UserError, match="KV without the recurrent state") as error:
        factory.offloading(config, model, 1 << 20, None)
    assert error.value.where == "kv_offload_bytes"
    for method in ("ngram", "a draft model"):
        options = engine_options(None, {"speculative_model": method})
        with pytest.raises(UserError, match="wrong guesses can't be taken out"):
            factory.speculator(None, model, None, options)


def test_a_model_with_windows_is_served_in_groups_and_gives_the_same_tokens() -> None:
    model = lower(captured("gemma3_text"))
    given = {"kv_cache_bytes": 1 << 18, "max_model_len": 128, "max_num_batched_tokens": 32, "max_num_seqs": 4}
    options = engine_options(RECIPE, given)
    config = factory.scheduler_config(model, options)
    assert config.kv_windows == (0, 8, 8)
    engine = factory.make_engine(model, config, None, None, None, CostModel())
    plain_config = factory.scheduler_config(model, options, layout=one_group(model.states))
    plain = Engine(ModelRunner(model, plain_config.num_blocks, plain_config.block_size), plain_config)
    asked = [[3 + (7 * i + n) % 120 for i in range(50)] for n in range(5)]
    params = SamplingParams(max_tokens=20, temperature=0.0)
    assert engine.generate(asked, params) == plain.generate(asked, params)
    block = options.block_size * model.kv_specs[0].token_bytes
    assert (1 << 18) - block < engine.runner.kv_bytes <= 1 << 18
    found, before = (each.info().memory_plan for each in (engine, plain))
    assert found.num_bytes == engine.runner.kv_bytes and found.num_sequences > before.num_sequences
    assert found.num_tokens > before.num_tokens


def test_a_pool_too_small_for_two_blocks_of_each_group_is_refused() -> None:
    model = lower(captured("gemma3_text"))
    block = RECIPE.runtime.block_size * model.kv_specs[0].token_bytes
    options = engine_options(RECIPE, {"kv_cache_bytes": 7 * block - 1})
    with pytest.raises(UserError, match=f"do not hold 6 blocks \\({7 * block:,} bytes"):
        factory.scheduler_config(model, options)
