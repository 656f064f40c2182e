"""Prefix cache: never another prompt's KV, whatever collides, and never another token than without it."""

from __future__ import annotations

import pytest

from optkit.kernels.cpu import native
from optkit.runtime.engine import Engine
from optkit.runtime.kv.digests import SECRET_BYTES
from optkit.runtime.kv.prefix_cache import PrefixCache, sha256
from optkit.runtime.types import EngineRequest, FinishReason, SamplingParams, TokenOutput
from tests.support import tiny_runtime
from tests.support.fakes import fake_engine

needs_native = pytest.mark.skipif(not native.available(), reason=str(native.missing_reason()))


def request(name: str, prompt: list[int], salt: str = "", **sampling: object) -> EngineRequest:
    params = SamplingParams(**{"max_tokens": 4, "temperature": 0.0} | sampling)
    return EngineRequest(
        request_id=name, prompt_ids=tuple(prompt), sampling=params, arrival=0.0, cache_salt=salt
    )


def serve(engine: Engine, *requests: EngineRequest) -> list[list[TokenOutput]]:
    """All outputs of each request."""
    outputs: dict[str, list[TokenOutput]] = {r.request_id: [] for r in requests}
    for r in requests:
        engine.add_request(r)
    while engine.has_work:
        for out in engine.step():
            outputs.setdefault(out.request_id, []).append(out)
        engine.scheduler.check()
    return list(outputs.values())


def cached(engine: Engine, prompt: list[int], salt: str = "", **sampling: object) -> int:
    """Tokens of ``prompt`` that are taken from the cache."""
    outputs = serve(engine, request("r", prompt, salt, **sampling))[0]
    assert outputs[0].first is not None
    return outputs[0].first.cached_tokens


def weaken(engine: Engine) -> Engine:
    """Digests of 8 bits, the same in each run: nearly everything collides, but not everything."""
    cache = PrefixCache(engine.config.block_size, lambda data: sha256(data)[:1])
    cache.rekey(bytes(SECRET_BYTES))
    engine.scheduler.kv.cache = cache
    return engine


# -- the tree -------------------------------------------------------------------------------------------


def test_a_digest_depends_on_everything_before_it_on_the_salt_and_on_the_process() -> None:
    cache = PrefixCache(4)
    ids = list(range(8))
    first, second = cache.digests("", ids, [])
    assert cache.digests("", [*ids[:4], 9, 9, 9, 9], [])[0] == first
    assert cache.digests("", [9, *ids[1:]], [])[1] != second
    assert not set(cache.digests("tenant", ids, [])) & {first, second}
    assert not set(PrefixCache(4).digests("", ids, [])) & {first, second}
    assert cache.digests("", [*ids, *ids], [first, second])[:2] == [first, second]


def test_equal_digests_are_no_proof() -> None:
    """Same digest, same tokens: still another node after another parent, or under another salt."""
    cache = PrefixCache(2, lambda data: b"")
    one = cache.add(b"", "", (1, 2))
    assert one is not None
    assert cache.find(b"", "", (1, 2)) is one
    assert cache.find(b"", "tenant", (1, 2)) is None
    assert cache.find(b"", "", (1, 3)) is None
    assert cache.find(b"", one, (1, 2)) is None
    assert cache.add(b"", "", (5, 6)) is None, "a collision replaced what was there"


# -- the engine -----------------------------------------------------------------------------------------


def test_full_blocks_are_found_and_one_token_is_always_computed() -> None:
    engine = fake_engine()  # blocks of 4
    prompt = list(range(1, 13))
    assert cached(engine, prompt) == 0
    assert cached(engine, prompt) == 8  # not 12: somebody has to compute logits
    assert cached(engine, [*prompt, 20]) == 12
    assert cached(engine, prompt[:6]) == 4
    assert cached(engine, [63, *prompt[1:]]) == 0
    stats = engine.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (12 + 12 + 13 + 6 + 12, 8 + 12 + 4)


def test_the_next_turn_of_a_conversation_finds_prompt_and_answer() -> None:
    engine = fake_engine()
    prompt = list(range(1, 9))
    answer = [t for out in serve(engine, request("r", prompt, max_tokens=9))[0] for t in out.token_ids]
    assert cached(engine, [*prompt, *answer, 5, 6]) == 16  # the last token of the answer has no KV


def test_salts_share_nothing() -> None:
    engine = fake_engine()
    prompt = list(range(1, 13))
    assert cached(engine, prompt, "a") == 0
    assert cached(engine, prompt, "b") == cached(engine, prompt) == 0
    assert cached(engine, prompt, "a") == 8


def test_a_reset_forgets_and_new_entries_are_found_again() -> None:
    engine = fake_engine()
    prompt = list(range(1, 13))
    engine.add_request(request("running", [*prompt, 40]))
    engine.step()
    engine.reset_prefix_cache()
    assert cached(engine, prompt) == 0  # while the first one still runs on its blocks
    assert cached(engine, prompt) == 8


def test_switched_off_it_keeps_nothing() -> None:
    engine = fake_engine(options={"enable_prefix_caching": False})
    prompt = list(range(1, 13))
    assert cached(engine, prompt) == cached(engine, prompt) == 0
    assert engine.stats().kv_blocks_cached == engine.stats().prefix_cache_queries == 0


def test_prompt_logprobs_need_every_position_and_skip_the_cache() -> None:
    engine = fake_engine()
    prompt = list(range(1, 13))
    cached(engine, prompt)
    assert cached(engine, prompt, prompt_logprobs=0) == 0


def test_kv_of_a_failed_request_is_not_reused() -> None:
    engine = fake_engine(options={"nan_token": 63})
    prompt = list(range(1, 13))
    assert cached(engine, prompt) == 0
    (outputs,) = serve(engine, request("bad", [*prompt, 63]))
    assert outputs[-1].finish_reason is FinishReason.ERROR
    assert cached(engine, prompt) == 0


def test_the_oldest_unused_prefix_is_evicted_first_and_its_end_before_its_beginning() -> None:
    engine = fake_engine(options={"num_blocks": 8})
    old, new = list(range(1, 13)), list(range(21, 33))
    cached(engine, old, max_tokens=1)
    cached(engine, new, max_tokens=1)
    cached(engine, list(range(40, 52)), max_tokens=1)  # 3 blocks, 2 are free: the last one of `old` goes
    assert cached(engine, new, max_tokens=1) == 8  # its last block is computed again: one more of `old` goes
    assert cached(engine, old, max_tokens=1) == 4


@pytest.mark.parametrize("weak", [False, True])
def test_five_hundred_prompts_cold_warm_and_without_cache_are_identical(weak: bool) -> None:
    stems = [list(range(start, start + 20)) for start in (1, 1, 5, 21)]
    requests = [
        request(
            f"r{i}",
            stems[i % 4][: i % 21] + [i % 61, i * 7 % 59],
            salt="tenant" * (i % 5 == 0),
            temperature=float(i % 2),
            seed=i,
            prompt_logprobs=0 if i % 10 == 0 else None,
        )
        for i in range(500)
    ]
    options = {"num_blocks": 40, "block_size": 2}

    def answers(engine: Engine) -> list[list[tuple[object, ...]]]:
        """Tokens of each request, and the logprobs of the prompts that asked for them."""
        found = serve(engine, *requests)
        tokens = [tuple(t for out in outputs for t in out.token_ids) for outputs in found]
        scored = [tuple(p for out in outputs for p in out.prompt_logprobs) for outputs in found]
        return [tokens, scored]

    plain = answers(fake_engine(options=options | {"enable_prefix_caching": False}))
    engine = fake_engine(options=options | {"num_host_blocks": 30})
    engine = weaken(engine) if weak else engine
    assert answers(engine) == plain, "cold"
    assert answers(engine) == plain, "warm"
    assert engine.stats().prefix_cache_hits > 0


@needs_native
@pytest.mark.parametrize("weak", [False, True])
@pytest.mark.parametrize("count", [24, pytest.param(500, marks=pytest.mark.soak)])
def test_a_model_answers_the_same_cold_warm_and_without_cache(count: int, weak: bool) -> None:
    """Tokens, and for each third prompt its logprobs, while the others run beside it."""
    requests = [
        request(
            f"r{i}",
            prompt,
            max_tokens=6,
            temperature=1.5 * (i % 2),
            seed=i,
            prompt_logprobs=1 if i % 3 == 0 else None,
            logprobs=1 if i % 6 == 0 else None,
        )
        for i, prompt in enumerate(tiny_runtime.prompts(count, stems=3))
    ]

    def answers(engine: Engine) -> list[tuple[object, ...]]:
        """All that each request got, however many steps it came in."""
        parts = ("token_ids", "logprobs", "prompt_logprobs")
        return [
            tuple(tuple(x for out in outputs for x in getattr(out, part)) for part in parts)
            for outputs in serve(engine, *requests)
        ]

    plain = answers(tiny_runtime.engine(enable_prefix_caching=False))
    engine = tiny_runtime.engine()
    engine = weaken(engine) if weak else engine
    assert answers(engine) == plain, "cold"
    assert answers(engine) == plain, "warm"
    assert engine.stats().prefix_cache_hits > 0
