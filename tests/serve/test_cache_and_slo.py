"""What a client sees of the prefix cache, of the time its first token took, and of a TTFT bound that cannot be met."""

from __future__ import annotations

import json
from typing import Any

import pytest

from optkit.runtime.specprefill.positions import Positions
from optkit.runtime.specprefill.queue import ScoringQueue, SpecPrefillOptions
from optkit.runtime.specprefill.scoring import Scoring
from tests.support.serve_fakes import FakeEngine, LateEngine, SteppedEngine, call, events, post, tiny_app

COMPLETIONS = "/v1/completions"
PROMPT = list(range(1, 40))


def ask(app: Any, **fields: Any) -> dict[str, Any]:
    response = post(app, COMPLETIONS, {"prompt": PROMPT, "max_tokens": 2} | fields)
    assert response.status_code == 200, response.text
    return response.json()["usage"]


def last_usage(app: Any, **fields: Any) -> dict[str, Any]:
    """The usage chunk of a stream."""
    body = {"prompt": PROMPT, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(post(app, COMPLETIONS, body | fields).text)
    return json.loads(chunks[-2])["usage"]


def test_usage_tells_cached_tokens_and_a_reset_forgets_them() -> None:
    app = tiny_app(SteppedEngine())
    assert ask(app)["prompt_tokens_details"] == {"cached_tokens": 0}
    cached = ask(app)["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < len(PROMPT)
    assert last_usage(app)["prompt_tokens_details"] == {"cached_tokens": cached}
    assert call(app, "POST", "/reset_prefix_cache").status_code == 200
    assert ask(app)["prompt_tokens_details"] == {"cached_tokens": 0}


def test_a_salt_of_ones_own_shares_nothing() -> None:
    app = tiny_app(SteppedEngine())
    ask(app)
    assert ask(app, cache_salt="mine")["prompt_tokens_details"] == {"cached_tokens": 0}
    assert ask(app, cache_salt="mine")["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("salt", ["", "a b", "x" * 65, "ü", 7])
def test_a_salt_is_a_short_plain_word(salt: object) -> None:
    response = post(tiny_app(), COMPLETIONS, {"prompt": PROMPT, "cache_salt": salt})
    assert response.status_code == 400 and response.json()["error"]["param"] == "cache_salt"


def test_several_choices_count_their_prompt_once() -> None:
    app = tiny_app(SteppedEngine())
    alone = ask(app)
    again = ask(app, n=3)
    assert again["prompt_tokens"] == alone["prompt_tokens"]
    assert again["prompt_tokens_details"]["cached_tokens"] < again["prompt_tokens"]


@pytest.mark.parametrize("usage", [ask, last_usage])
def test_where_the_time_to_the_first_token_went(usage: Any) -> None:
    app = tiny_app(SteppedEngine())
    assert "ttft_details" not in usage(app)
    (details,) = usage(app, ttft_details=True)["ttft_details"]
    parts = [details[name] for name in ("before_queue", "queue", "prefill", "chunk_wait")]
    assert all(part >= 0 for part in parts) and sum(parts) > 0
    assert details["num_chunks"] >= 1 and details["cached_tokens"] > 0


class Halves:
    """A scorer that keeps the second half of a prompt."""

    def advance(self, scoring: Scoring, limit: int) -> Positions:
        prompt = scoring.part.token_ids
        return Positions.of(range(len(prompt) // 2, len(prompt)), prompt)

    def release(self) -> None:
        """Nothing to free."""


@pytest.mark.parametrize("usage", [ask, last_usage])
def test_usage_tells_the_tokens_that_specprefill_kept(usage: Any) -> None:
    stepped = SteppedEngine()
    stepped.engine.specprefill = ScoringQueue(Halves, SpecPrefillOptions(threshold=len(PROMPT)))  # type: ignore[arg-type]
    app, kept = tiny_app(stepped), len(PROMPT) - len(PROMPT) // 2
    details = {"cached_tokens": 0, "specprefill_kept_tokens": kept}
    for fields in ({"specprefill": True}, {"specprefill": True, "n": 2}):
        found = usage(app, **fields)
        assert found["prompt_tokens"] == len(PROMPT) and found["prompt_tokens_details"] == details
    assert usage(app)["prompt_tokens_details"] == {"cached_tokens": 0}
    metrics = call(app, "GET", "/metrics").text
    assert "optkit:specprefill_tokens_total" in metrics and "optkit:specprefill_kept_tokens_total" in metrics


def test_details_without_a_usage_chunk_are_refused() -> None:
    body = {"prompt": PROMPT, "stream": True, "ttft_details": True}
    response = post(tiny_app(), COMPLETIONS, body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "ttft_details"


def test_priorities_need_a_policy_that_knows_them() -> None:
    response = post(tiny_app(), COMPLETIONS, {"prompt": PROMPT, "priority": -1})
    assert response.status_code == 400 and response.json()["error"]["param"] == "priority"
    engine = FakeEngine()
    app = tiny_app(engine, scheduling_policy="slo")
    assert post(app, COMPLETIONS, {"prompt": PROMPT, "priority": -1}).status_code == 200
    assert engine.requests[0].priority == -1
    assert post(tiny_app(), COMPLETIONS, {"prompt": PROMPT, "priority": 0}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_ttft_bound_that_cannot_be_met_is_429_with_a_time(stream: bool) -> None:
    response = post(tiny_app(LateEngine()), COMPLETIONS, {"prompt": PROMPT, "stream": stream})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert response.json()["error"]["code"] == "ttft_slo_unreachable"


def test_the_counters_of_the_engine_are_metrics() -> None:
    app = tiny_app(SteppedEngine())
    ask(app)
    usage = ask(app)
    text = call(app, "GET", "/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(("vllm:", "optkit:")))
    found = {name.split("{")[0]: float(value) for name, value in values.items()}
    assert found["vllm:prefix_cache_queries_total"] == 2 * len(PROMPT)
    assert found["vllm:prefix_cache_hits_total"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert found["vllm:request_queue_time_seconds_count"] == 2
    assert found["vllm:request_prefill_time_seconds_count"] == 2
    assert found["vllm:spec_decode_num_drafts_total"] == found["optkit:kv_offload_saved_blocks_total"] == 0
