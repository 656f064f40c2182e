"""Digests of prompts in front of the engines, against the digests that an engine publishes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.fleet.digests import Chains, Prompt, key_of
from optkit.runtime.kv.manager import KVManager
from optkit.runtime.kv.prefix_cache import PrefixCache
from optkit.runtime.report import Mark
from optkit.runtime.types import EngineRequest, SamplingParams
from tests.support.fakes import fake_engine

SECRET = bytes(range(32))


def nobody(key: int) -> bool:
    return False


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_the_digests_are_those_that_an_engine_publishes(salt: str) -> None:
    engine, ids = fake_engine(), tuple(range(1, 14))
    engine.share_digests(SECRET)
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    engine.add_request(
        EngineRequest(request_id="r", prompt_ids=ids, sampling=sampling, arrival=0.0, cache_salt=salt)
    )
    while engine.has_work:
        engine.step()
    published = engine.report(Mark()).changes
    prompt = Prompt(Chains(SECRET), ids, salt)
    assert published is not None and set(published.added) == set(prompt.digests(4))
    assert set(Prompt(Chains(), ids, salt).digests(4)).isdisjoint(published.added)


@given(st.integers(1, 40), st.integers(1, 9))
def test_a_cache_gives_whole_blocks_and_leaves_a_token(length: int, size: int) -> None:
    prompt = Prompt(Chains(SECRET), list(range(length)))
    found = prompt.blocks(size, nobody)
    assert len(found.digests) == length // size
    assert len(found.keys) == (length - 1) // size
    assert found.keys == [key_of(digest) for digest in found.digests[: len(found.keys)]]


def test_a_prompt_that_reads_no_cache_has_digests_to_publish_and_no_keys() -> None:
    prompt = Prompt(Chains(SECRET), list(range(9)), reads_cache=False)
    assert len(prompt.digests(4)) == 2 and prompt.blocks(4, nobody).keys == []


def test_prefixes_of_the_artifact_are_found_for_every_salt() -> None:
    kv = KVManager(8, 2, PrefixCache(2), max_pinned_blocks=4)
    kv.adopt("baked", [((1, 2), [True]), ((3, 4), [True])], 0.0)
    kv.rekey(SECRET)
    held = {key_of(digest) for digest in kv.changes(Mark()).added}
    for salt in ("", "tenant"):
        prompt = Prompt(Chains(SECRET), [1, 2, 3, 4, 5, 6, 7], salt)
        assert prompt.blocks(2, nobody).common == []
        found = prompt.blocks(2, held.__contains__)
        assert set(found.common) == held and len(found.common) == 2
    assert len(Prompt(Chains(SECRET), [1, 2, 3, 4]).blocks(2, held.__contains__).common) == 1, (
        "a token is left"
    )


def test_a_secret_of_a_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Chains(b"short")
