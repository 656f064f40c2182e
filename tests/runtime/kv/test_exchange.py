"""Blocks of one engine in the prefix cache of another: the same tokens as without, and nobody else's KV."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from optkit.kernels.cpu import native
from optkit.lowering.lower import lower
from optkit.runtime.engine import Engine
from optkit.runtime.kv import exchange as module
from optkit.runtime.kv.exchange import (
    Adoption,
    BlockExchange,
    BlockKV,
    Incoming,
    Outgoing,
    hot_paths,
    kept_groups,
)
from optkit.runtime.types import SamplingParams
from tests.passes.test_latent_kv import served as latent_engine
from tests.runtime.test_captured_model import WINDOWED, eager_greedy, windowed_engine
from tests.support import tiny_runtime
from tests.support.architectures import tiny_model
from tests.support.driven import SECRET, ask
from tests.support.fakes import fake_engine
from tests.support.graphs import captured

needs_native = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


def keyed(engine: Engine, secret: bytes = SECRET) -> Engine:
    engine.share_digests(secret)
    return engine


def cached(engine: Engine, prompt: list[int], salt: str = "") -> tuple[list[int], int]:
    """The answer to ``prompt``, and the prompt's tokens from the cache."""
    engine.add_request(ask("r", prompt, salt=salt))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        engine.scheduler.check()
    assert outputs[0].first is not None
    return [token for output in outputs for token in output.generated_ids], outputs[0].first.cached_tokens


def give(
    source: Engine,
    target: Engine,
    prompt: list[int],
    salt: str = "",
    change: Callable[[int, BlockKV], BlockKV] = lambda number, block: block,
) -> int:
    """Move the blocks of ``prompt``; returns the number of accepted blocks."""
    incoming = Incoming(BlockExchange(target), salt, prompt)
    outgoing = Outgoing(BlockExchange(source), incoming.wanted)
    count = 0
    try:
        for number in range(len(incoming.wanted)):
            with source.turn:
                block = outgoing.take(number)
            if block is None or not incoming.accept(number, change(number, block)):
                break
            count += 1
            target.scheduler.check()
    finally:
        incoming.close()
        outgoing.close()
    source.scheduler.check()
    target.scheduler.check()
    return count


def windowed(name: str) -> Callable[[], Engine]:
    return lambda: windowed_engine(lower(captured(name, **WINDOWED[name])), 160)


MODELS: dict[str, Callable[[], Engine]] = {
    "fake": lambda: fake_engine(),
    "fake windows": lambda: fake_engine({"kv_windows": (0, 9, 9), "num_blocks": 96}),
    "int8 KV": lambda: tiny_runtime.engine(),
    "latent KV": lambda: latent_engine(num_blocks=40),
    "windows": windowed("gemma3_text"),
    "one window": windowed("mistral"),
}


@needs_native
@pytest.mark.parametrize("name", MODELS)
def test_a_transferred_prefix_is_a_hit_with_the_same_answer(name: str) -> None:
    make = MODELS[name]
    source, target = keyed(make()), keyed(make())
    vocabulary = source.runner.vocab_size
    prompt = [(7 * i + 3 * (i // 5)) % vocabulary for i in range(45)]
    expected = make().generate([prompt], GREEDY)[0]
    assert cached(source, prompt) == (expected, 0)
    size = source.config.block_size
    assert give(source, target, prompt) == 44 // size
    assert cached(target, prompt) == (expected, 44 // size * size)
    assert cached(target, [*prompt, *expected, 1])[1] >= 44 // size * size


@needs_native
def test_an_answer_after_a_transfer_is_that_of_transformers() -> None:
    """The other side is transformers' eager forward of the model with windows."""
    make = MODELS["windows"]
    source, target = keyed(make()), keyed(make())
    prompt = [(5 * i) % 60 + 1 for i in range(40)]
    source.generate([prompt], GREEDY)
    assert give(source, target, prompt) > 0
    reference = tiny_model("gemma3_text", **WINDOWED["gemma3_text"])
    tokens, hit = cached(target, prompt)
    assert tokens == eager_greedy(reference, prompt)[: len(tokens)] and hit > 30


def test_only_what_is_missing_is_wanted() -> None:
    source, target = keyed(fake_engine()), keyed(fake_engine())
    prompt = list(range(1, 30))
    cached(source, prompt)
    cached(target, prompt[:12])
    with Ended(Incoming(BlockExchange(target), "", prompt)) as incoming:
        assert len(incoming.wanted) == 7 - 3
    assert give(source, target, prompt) == 4
    with Ended(Incoming(BlockExchange(target), "", prompt)) as incoming:
        assert incoming.wanted == ()
    assert cached(target, prompt)[1] == 28


class Ended:
    """A context that ends a lease."""

    def __init__(self, incoming: Incoming) -> None:
        self._incoming = incoming

    def __enter__(self) -> Incoming:
        return self._incoming

    def __exit__(self, *_: object) -> None:
        self._incoming.close()


def test_other_salts_and_other_secrets_share_nothing() -> None:
    prompt = list(range(1, 30))
    source = keyed(fake_engine())
    cached(source, prompt, salt="a")
    assert give(source, keyed(fake_engine()), prompt, salt="b") == 0
    assert give(source, keyed(fake_engine(), b"x" * 32), prompt, salt="a") == 0
    target = keyed(fake_engine())
    assert give(source, target, prompt, salt="a") == 7
    assert cached(target, prompt, salt="b")[1] == 0 and cached(target, prompt, salt="a")[1] == 28


@pytest.mark.parametrize("wrong", ["tokens", "groups", "size"])
def test_a_block_of_something_else_is_refused(wrong: str) -> None:
    prompt = list(range(1, 30))
    source, target = keyed(fake_engine()), keyed(fake_engine())
    cached(source, prompt)

    def change(number: int, block: BlockKV) -> BlockKV:
        tokens = (9,) * 4 if wrong == "tokens" else block.tokens
        groups = (1,) if wrong == "groups" else block.groups
        data = block.data[1:] if wrong == "size" else block.data
        return BlockKV(block.before, tokens, groups, data) if number == 3 else block

    with pytest.raises(ValueError, match="block"):
        give(source, target, prompt, change=change)
    assert cached(target, prompt) == (fake_engine().generate([prompt], GREEDY)[0], 12)


def test_an_engine_without_room_takes_what_fits_and_serves_all_the_same() -> None:
    prompt = list(range(1, 41))
    source, target = keyed(fake_engine()), keyed(fake_engine({"num_blocks": 14, "max_model_len": 52}))
    expected = cached(source, prompt)[0]
    target.add_request(ask("other", [60, 61, 62, 63] * 5, max_tokens=20))
    for _ in range(6):
        target.step()
    moved = give(source, target, prompt)
    assert 0 < moved < 9
    while target.has_work:
        target.step()
        target.scheduler.check()
    tokens, hit = cached(target, prompt)
    assert tokens == expected and hit > 0


def test_what_makes_room_is_saved_to_the_offload_store_first() -> None:
    source = keyed(fake_engine())
    target = keyed(fake_engine({"num_blocks": 16, "num_host_blocks": 64, "max_model_len": 60}))
    old, prompt = [50 - i for i in range(40)], list(range(1, 41))
    answers = cached(target, old)[0], cached(source, prompt)[0]
    assert give(source, target, prompt) == 9
    assert cached(target, old) == (answers[0], 36)  # loaded from the store
    assert cached(target, prompt) == (answers[1], 36)
    assert target.stats().offload_saves > 0


def test_blocks_in_the_offload_store_are_given_as_well() -> None:
    source = keyed(fake_engine({"num_blocks": 16, "num_host_blocks": 64, "max_model_len": 60}))
    target = keyed(fake_engine())
    prompt = list(range(1, 41))
    expected = cached(source, prompt)[0]
    cached(source, [50 - i for i in range(40)])
    assert source.stats().kv_blocks_offloaded > 0
    assert give(source, target, prompt) == 9
    assert cached(target, prompt) == (expected, 36)


def test_a_lease_ends_where_a_request_needs_the_room() -> None:
    source = keyed(fake_engine({"num_blocks": 12, "max_model_len": 48}))
    prompt, other = list(range(1, 30)), [50 - i for i in range(40)]
    cached(source, prompt)
    with Ended(Incoming(BlockExchange(keyed(fake_engine())), "", prompt)) as incoming:
        outgoing = Outgoing(BlockExchange(source), incoming.wanted)
        assert source.scheduler.kv.blocks.num_used == 7
        assert cached(source, other)[0] == fake_engine().generate([other], GREEDY)[0]
        assert source.scheduler.kv.leases.tables == []
        with source.turn:
            assert outgoing.take(6) is None


def test_a_lease_without_progress_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    source = keyed(fake_engine())
    monkeypatch.setattr(source.scheduler, "clock", lambda: now[0])
    prompt = list(range(1, 30))
    cached(source, prompt)
    with Ended(Incoming(BlockExchange(keyed(fake_engine())), "", prompt)) as incoming:
        outgoing = Outgoing(BlockExchange(source), incoming.wanted)
    now[0] += module.LEASE_SECONDS - 1
    with source.turn:
        assert outgoing.take(0) is not None  # renews
    now[0] += module.LEASE_SECONDS - 1
    cached(source, [1])
    assert len(source.scheduler.kv.leases.tables[0]) == 7
    now[0] += 2
    cached(source, [2])
    assert source.scheduler.kv.leases.tables == []


def test_a_reset_in_the_middle_ends_a_transfer_and_nothing_else() -> None:
    prompt = list(range(1, 30))
    source, target = keyed(fake_engine()), keyed(fake_engine())
    expected = cached(source, prompt)[0]

    def change(number: int, block: BlockKV) -> BlockKV:
        if number == 3:
            target.reset_prefix_cache()
        return block

    assert give(source, target, prompt, change=change) == 3
    assert cached(target, prompt) == (expected, 0)


def test_models_with_recurrent_states_and_engines_without_a_cache_take_no_part() -> None:
    recurrent = fake_engine({"num_state_slots": 8, "num_checkpoints": 4})
    assert "recurrent" in str(BlockExchange(recurrent).refusal)
    assert "off" in str(BlockExchange(fake_engine({"enable_prefix_caching": False})).refusal)
    assert BlockExchange(fake_engine()).refusal is None


# -- blocks handed on by a replica that leaves ----------------------------------------------------------------


def hand_on(source: Engine, target: Engine, num_bytes: int = 1 << 20) -> int:
    ours, adoption = BlockExchange(source), Adoption(BlockExchange(target))
    count = 0
    for node in list(hot_paths(ours, num_bytes)):
        block = ours.read(node, kept_groups(node))
        assert block is not None
        count += adoption.accept(block)
    adoption.close()
    target.scheduler.check()
    return count


def test_the_most_recently_used_prefixes_are_handed_on_within_a_budget() -> None:
    source, target = keyed(fake_engine()), keyed(fake_engine())
    prompts = [[number + 1, *range(20, 40)] for number in range(4)]
    expected = [cached(source, prompt, salt=str(n % 2))[0] for n, prompt in enumerate(prompts)]
    size = BlockExchange(source).block_bytes[0]
    assert hand_on(source, target, 13 * size) == 13
    found = [cached(target, prompt, salt=str(n % 2)) for n, prompt in enumerate(prompts)]
    assert [tokens for tokens, _ in found] == expected
    assert [hit for _, hit in found] == [0, 4, 20, 20]  # 13 blocks: 6 with the answer, 6, 1
    assert cached(target, prompts[3], salt="0")[1] == 0  # of the other salt


def test_prefixes_of_the_artifact_stay_and_are_given_by_nobody() -> None:
    source, target = keyed(fake_engine()), keyed(fake_engine())
    kv = source.scheduler.kv
    assert kv.cache is not None
    for place in kv.adopt("artifact", [((1, 2, 3, 4), [True])], 0.0):
        assert place.block is not None
        source.runner.write_block(place.block, np.arange(1, 5, dtype=np.int64).view(np.uint8))
    prompt = [1, 2, 3, 4, *range(10, 22)]
    expected = cached(source, prompt)[0]
    assert hand_on(source, target) == 0
    with pytest.raises(ValueError, match="adopted"):
        Adoption(BlockExchange(target)).accept(
            BlockKV("\0common", (1, 2, 3, 4), (0,), np.zeros(32, np.uint8))
        )
    assert cached(target, prompt) == (expected, 0)


def test_a_block_without_the_one_before_is_not_adopted() -> None:
    target = keyed(fake_engine())
    block = BlockKV(b"unknown", (1, 2, 3, 4), (0,), np.zeros(32, np.uint8))
    assert not Adoption(BlockExchange(target)).accept(block)


def test_nodes_whose_kv_did_not_come_leave_the_tree() -> None:
    """Of layers with a window alone the first nodes have no KV, and are of no use without the last."""
    options = {"kv_windows": (9,), "num_blocks": 96}
    source, target = keyed(fake_engine(dict(options))), keyed(fake_engine(dict(options)))
    prompt = list(range(1, 46))
    cached(source, prompt)
    incoming = Incoming(BlockExchange(target), "", prompt)
    outgoing = Outgoing(BlockExchange(source), incoming.wanted)
    assert [len(wanted.groups) for wanted in incoming.wanted] == [0] * 9 + [1] * 2
    for number in range(9):
        with source.turn:
            block = outgoing.take(number)
        assert block is not None and block.data.nbytes == 0 and incoming.accept(number, block)
    cache = target.scheduler.kv.cache
    assert cache is not None and len(cache) == 9
    incoming.close()
    outgoing.close()
    assert len(cache) == 0
    target.scheduler.check()
