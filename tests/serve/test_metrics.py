from __future__ import annotations

import asyncio
import json
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from optkit.runtime.types import FinishReason
from tests.support.serve_fakes import FakeEngine, call, client, events, tiny_app

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LABELS = {"model_name": "tiny", "engine": "0"}


def samples(app: Any) -> dict[tuple[str, str], float]:
    """(name, finished_reason or bucket edge or "") -> value."""
    found = {}
    for family in text_string_to_metric_families(call(app, "GET", "/metrics").text):
        for sample in family.samples:
            extra = sample.labels.get("finished_reason") or sample.labels.get("le") or ""
            found[sample.name, extra] = sample.value
            if sample.name.startswith("vllm:") and not sample.name.startswith("vllm:cache_config"):
                assert LABELS.items() <= sample.labels.items(), sample
    return found


def test_counters_equal_what_clients_were_told() -> None:
    """Chats and completions, streamed and whole, several prompts, cut by length, stop string and end."""
    engine = FakeEngine()
    app = tiny_app(engine)
    messages = [{"role": "user", "content": "Hello"}]
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": messages}),
        (CHAT, {"messages": messages, "max_tokens": 3}),
        (CHAT, {"messages": messages, "stop": "you", **stream}),
        (COMPLETIONS, {"prompt": ["a", "bc", "the cat"], "max_tokens": 100}),
        (COMPLETIONS, {"prompt": ["a", "bc"], **stream}),
    ]

    async def go() -> list[dict[str, int]]:
        async with client(app) as http:
            answers = await asyncio.gather(*(http.post(path, json=body) for path, body in bodies * 3))
        return [usage_of(answer.text) for answer in answers]

    usages = asyncio.run(go())
    got = samples(app)
    prompt, generated = (sum(u[f"{kind}_tokens"] for u in usages) for kind in ("prompt", "completion"))
    assert got["vllm:prompt_tokens_total", ""] == prompt
    assert got["vllm:generation_tokens_total", ""] == generated
    assert got["vllm:request_success_total", "stop"] == 3 * 5
    assert got["vllm:request_success_total", "length"] == 3 * 3
    sequences = 3 * 8
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_generation_tokens"):
        assert got[f"vllm:{name}_count", ""] == sequences
    assert got["vllm:request_prompt_tokens_sum", ""] == prompt
    assert got["vllm:request_generation_tokens_sum", ""] == generated
    assert got["vllm:inter_token_latency_seconds_count", ""] == generated - sequences


def usage_of(text: str) -> dict[str, int]:
    return json.loads(events(text)[-2] if text.startswith("data:") else text)["usage"]


def test_gauges_are_the_engine_s() -> None:
    got = samples(tiny_app())
    assert got["vllm:num_requests_running", ""] == 2
    assert got["vllm:num_requests_waiting", ""] == 3
    assert got["vllm:kv_cache_usage_perc", ""] == 0.25
    assert got["vllm:num_preemptions_total", ""] == 0


def test_the_ttft_bound_is_a_bucket_edge() -> None:
    got = samples(tiny_app(ttft_slo_ms=700))
    assert ("vllm:time_to_first_token_seconds_bucket", "0.7") in got
    assert ("vllm:time_to_first_token_seconds_bucket", "0.7") not in samples(tiny_app())


def test_errors_and_refusals_are_counted_apart() -> None:
    engine = FakeEngine()
    app = tiny_app(engine)
    call(app, "POST", COMPLETIONS, json={"prompt": ""})
    engine.fail_after = 2
    call(app, "POST", COMPLETIONS, json={"prompt": "a"})
    got = samples(app)
    assert got["vllm:request_success_total", "error"] == 1
    assert sum(got["vllm:request_success_total", reason.value] for reason in FinishReason) == 1
    assert got["vllm:generation_tokens_total", ""] == 2
