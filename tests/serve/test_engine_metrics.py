"""What ``/metrics`` says of the engine moves when it happens in the real scheduler."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from optkit.runtime.info import EngineInfo
from optkit.runtime.overlap import OverlapScheduler
from optkit.runtime.scheduling.scheduler import SchedulerConfig
from optkit.runtime.types import EngineRequest, SamplingParams
from tests.support.fakes import fake_engine
from tests.support.serve_fakes import FakeEngine, LateEngine, SteppedEngine, call, client, post, tiny_app

COMPLETIONS = "/v1/completions"
VLLM_STEP_EDGES = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]


def families(app: Any) -> dict[str, Any]:
    return {
        family.name: family for family in text_string_to_metric_families(call(app, "GET", "/metrics").text)
    }


def values(app: Any, name: str, label: str) -> dict[str, float]:
    """Value of the label -> value of the samples ``name``."""
    found = [sample for family in families(app).values() for sample in family.samples if sample.name == name]
    return {sample.labels.get(label, ""): sample.value for sample in found}


def value(app: Any, name: str) -> float:
    [only] = values(app, name, "").values()
    return only


def post_all(app: Any, bodies: list[dict[str, Any]]) -> list[int]:
    """The statuses of requests sent at once."""

    async def go() -> list[int]:
        async with client(app) as http:
            answers = await asyncio.gather(*(http.post(COMPLETIONS, json=body) for body in bodies))
        return [answer.status_code for answer in answers]

    return asyncio.run(go())


# -- steps ------------------------------------------------------------------------------------------


def test_iteration_tokens_count_what_each_step_computes() -> None:
    """100 prompt tokens in steps of 64 and 36, the second of which gives a token; two more steps of one token."""
    app = tiny_app(SteppedEngine(max_num_batched_tokens=64, enable_prefix_caching=False))
    assert families(app)["vllm:iteration_tokens_total"].type == "histogram"
    assert value(app, "vllm:iteration_tokens_total_count") == 0
    post(app, COMPLETIONS, {"prompt": [5] * 100, "max_tokens": 3, "ignore_eos": True})
    assert value(app, "vllm:iteration_tokens_total_count") == 4
    assert value(app, "vllm:iteration_tokens_total_sum") == 64 + 36 + 1 + 1
    buckets = values(app, "vllm:iteration_tokens_total_bucket", "le")
    assert [float(edge) for edge in buckets][:-1] == VLLM_STEP_EDGES
    assert [buckets[edge] for edge in ("1.0", "32.0", "64.0", "128.0", "+Inf")] == [2, 2, 4, 4, 4]


def test_inference_time_is_from_the_first_step_to_the_last_token() -> None:
    app = tiny_app(SteppedEngine(step_delay=0.01))
    post(app, COMPLETIONS, {"prompt": [5] * 10, "max_tokens": 4, "ignore_eos": True})
    took = value(app, "vllm:request_inference_time_seconds_sum")
    assert value(app, "vllm:request_inference_time_seconds_count") == 1
    assert 0.04 <= took <= value(app, "vllm:e2e_request_latency_seconds_sum")
    assert took >= value(app, "vllm:request_decode_time_seconds_sum") + 0.01


def test_inference_time_of_a_scored_prompt_is_its_prefill() -> None:
    app = tiny_app(SteppedEngine(step_delay=0.01))
    post(app, COMPLETIONS, {"prompt": [5] * 10, "max_tokens": 0, "echo": True, "logprobs": 1})
    assert value(app, "vllm:request_inference_time_seconds_sum") >= 0.01


def test_inference_time_is_not_observed_of_a_request_that_never_ran() -> None:
    engine = FakeEngine()
    engine.fail_after = 0
    app = tiny_app(engine)
    post(app, COMPLETIONS, {"prompt": "a"})
    assert value(app, "vllm:request_inference_time_seconds_count") == 0


# -- preemption and waiting ---------------------------------------------------------------------------


def test_preemptions_are_counted_for_each_request() -> None:
    """Three requests of up to 50 tokens each in a pool of 64 cannot all stay."""
    engine = SteppedEngine(num_blocks=16, block_size=4, max_num_seqs=4, enable_prefix_caching=False)
    app = tiny_app(engine)
    body = {"prompt": [5] * 10, "max_tokens": 40, "ignore_eos": True}
    assert post_all(app, [body] * 3) == [200] * 3
    total = value(app, "vllm:num_preemptions_total")
    assert total > 0
    assert value(app, "vllm:request_num_preemptions_count") == 3
    assert value(app, "vllm:request_num_preemptions_sum") == total
    assert values(app, "vllm:request_num_preemptions_bucket", "le")["0.0"] < 3


def test_request_without_preemption_is_in_the_lowest_bucket() -> None:
    app = tiny_app(SteppedEngine())
    post(app, COMPLETIONS, {"prompt": "a", "max_tokens": 2})
    assert set(values(app, "vllm:request_num_preemptions_bucket", "le").values()) == {1}


def request(name: str, num_prompt: int = 8) -> EngineRequest:
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    return EngineRequest(request_id=name, prompt_ids=(5,) * num_prompt, sampling=sampling, arrival=0.0)


def test_waiting_for_a_place_is_waiting_for_capacity() -> None:
    engine = SteppedEngine(max_num_seqs=1)
    app = tiny_app(engine)
    for name in "abc":
        engine.engine.add_request(request(name))
    engine.engine.step()
    assert value(app, "vllm:num_requests_waiting") == 2
    reasons = values(app, "vllm:num_requests_waiting_by_reason", "reason")
    assert reasons == {"capacity": 2, "deferred": 0}


def test_preempted_sequence_whose_token_is_on_its_way_is_deferred() -> None:
    config = SchedulerConfig(
        max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64, block_size=4, num_blocks=32
    )
    scheduler = OverlapScheduler(config)
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    scheduler.advance(scheduler.schedule())
    scheduler.preempt(scheduler.running[-1])
    stats = scheduler.stats()
    assert (stats.num_waiting, stats.num_deferred) == (1, 1)


# -- admission --------------------------------------------------------------------------------------


def test_rejections_are_counted_by_reason() -> None:
    app = tiny_app(FakeEngine(), max_num_seqs=1, max_queue=1)
    rejections = "vllm:admission_rejections_total"
    assert values(app, rejections, "reason") == {"max_queue": 0, "ttft_slo": 0}
    statuses = post_all(app, [{"prompt": "a", "n": 2}] * 3)
    assert sorted(statuses) == [200, 429, 429]
    assert values(app, rejections, "reason") == {"max_queue": 2, "ttft_slo": 0}
    assert post(app, COMPLETIONS, {"prompt": "a", "n": 3}).status_code == 400  # never, not just not now
    assert values(app, rejections, "reason") == {"max_queue": 2, "ttft_slo": 0}


def test_refusal_of_a_late_first_token_is_one_rejection_whatever_n_is() -> None:
    app = tiny_app(LateEngine())
    assert post(app, COMPLETIONS, {"prompt": "a", "n": 3}).status_code == 429
    assert values(app, "vllm:admission_rejections_total", "reason") == {"max_queue": 0, "ttft_slo": 1}


# -- the cache ----------------------------------------------------------------------------------------


def cache_config(engine: Any) -> dict[str, str]:
    [sample] = families(tiny_app(engine))["vllm:cache_config_info"].samples
    assert sample.value == 1
    return sample.labels


def test_cache_config_has_vllm_s_labels() -> None:
    engine = SteppedEngine(num_blocks=96, block_size=8, num_host_blocks=0)
    plan = engine.engine.info().memory_plan
    assert cache_config(engine) == {
        "engine": "0",
        "block_size": "8",
        "num_gpu_blocks": "96",
        "num_cpu_blocks": "0",
        "cache_dtype": "float32",
        "enable_prefix_caching": "True",
        "gpu_memory_utilization": "None",
        "kv_cache_memory_bytes": str(plan.num_bytes + plan.state_bytes),
        "kv_cache_size_tokens": str(96 * 8),
    }


def test_cache_config_follows_the_engine() -> None:
    engine = SteppedEngine(enable_prefix_caching=False)
    engine.engine.memory_share = 0.9
    labels = cache_config(engine)
    assert (labels["enable_prefix_caching"], labels["gpu_memory_utilization"]) == ("False", "0.9")
    assert cache_config(SteppedEngine(num_host_blocks=7))["num_cpu_blocks"] == "7"


@pytest.mark.parametrize("known", [None, fake_engine().info()])
def test_cache_config_of_an_engine_that_is_being_replaced_is_the_last_one(known: EngineInfo | None) -> None:
    engine = FakeEngine()
    engine.info = known
    app = tiny_app(engine)
    first = families(app).get("vllm:cache_config_info")
    assert (first is None) == (not known)
    engine.info = None
    again = families(app).get("vllm:cache_config_info")
    assert (again and again.samples) == (first and first.samples)


def test_cached_blocks_are_those_that_a_finished_request_left_behind() -> None:
    """33 prompt tokens and an answer of 4: the last token's KV is never computed, so 9 blocks of 4 are full."""
    engine = SteppedEngine(num_blocks=32, block_size=4)
    app = tiny_app(engine)
    assert value(app, "optkit:kv_cached_blocks") == 0
    post(app, COMPLETIONS, {"prompt": [5] * 33, "max_tokens": 4, "ignore_eos": True})
    assert value(app, "optkit:kv_cached_blocks") == (33 + 4 - 1) // 4
    assert value(app, "vllm:kv_cache_usage_perc") == 0


def test_offloaded_blocks_are_those_in_the_store_now() -> None:
    """A pool of 8 blocks has no room for the KV of two prompts of 5 blocks each."""
    engine = SteppedEngine(num_blocks=8, block_size=4, num_host_blocks=16)
    app = tiny_app(engine)
    assert value(app, "optkit:kv_offloaded_blocks") == 0
    for token in (5, 6, 7):
        post(app, COMPLETIONS, {"prompt": [token] * 20, "max_tokens": 2, "ignore_eos": True})
    saved, held = value(app, "optkit:kv_offload_saved_blocks_total"), value(app, "optkit:kv_offloaded_blocks")
    assert 0 < held <= saved and held <= 16


# -- the process --------------------------------------------------------------------------------------


def test_load_seconds_and_restarts_are_those_of_the_engine() -> None:
    engine = FakeEngine()
    app = tiny_app(engine)
    assert values(app, "optkit:engine_load_seconds", "") == {}
    assert value(app, "optkit:engine_restarts_total") == 0
    engine.info = msgspec.structs.replace(fake_engine().info(), load_seconds=2.5)
    engine.num_restarts = 2
    assert value(app, "optkit:engine_load_seconds") == 2.5
    assert value(app, "optkit:engine_restarts_total") == 2
