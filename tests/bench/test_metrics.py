"""Formulas by hand, and their bounds by property."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.bench.metrics import DEFINITIONS, LatencyBounds, latency, percentile, slo_misses, summarize
from optkit.bench.records import Chunk, RequestRecord, span


def record(
    index=0, send=10.0, role_only=10.5, times=(11.0, 11.2, 11.6), tokens=(1, 1, 2), done=12.0, **extra
):
    """A role-only chunk, text chunks, one empty final chunk at 11.8, the end at 12."""
    texts = [Chunk(t, n) for t, n in zip(times, tokens, strict=True)]
    chunks = [Chunk(role_only, 0, True), *texts, Chunk(11.8, 0, True)]
    values = {"output_tokens": sum(tokens), **extra}
    return RequestRecord(index=index, send=send, chunks=chunks, done=done, **values)


EXPECTED = {
    "optkit": {
        "ttft": [1000],
        "tpot": [1000 / 3],
        "itl_chunks": [200, 400],
        "itl_mean": [200],
        "e2e": [2000],
    },
    "vllm": {"ttft": [500], "tpot": [1300 / 3], "itl": [500, 200, 400, 200], "e2e": [1800]},
    "aiperf": {"ttft": [1000], "itl": [200], "icl": [200, 400], "e2e": [1600]},
    "guidellm": {"ttft": [1000], "tpot": [400], "itl": [200], "e2e": [2000]},
    "llmperf": {"ttft": [1000], "itl": [500], "e2e": [2000]},
}


@pytest.mark.parametrize("definitions", DEFINITIONS)
def test_formulas_by_hand(definitions):
    for name, metric in DEFINITIONS[definitions].items():
        samples = [1e3 * s for s in metric.samples(record())]
        assert samples == pytest.approx(EXPECTED[definitions][name]), name
        assert metric.formula


def test_every_definition_is_in_the_expectations():
    assert {d: set(t) for d, t in DEFINITIONS.items()} == {d: set(t) for d, t in EXPECTED.items()}


def test_percentiles_interpolate_linearly():
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile([1, 2], 95) == pytest.approx(1.95)
    assert percentile([], 50) is None


def test_failed_requests_are_reported_and_kept_out_of_latency():
    broken = RequestRecord(index=1, send=10.0, error="HTTP 500")
    summary = summarize([record(), broken], LatencyBounds(ttft=1500))
    assert (summary["requests"], summary["failed"]) == (2, 1)
    assert summary["latency_ms"]["ttft"]["samples"] == 1
    assert summary["duration_s"] == 2
    assert summary["output_throughput"] == 2  # 4 tokens in 2 s
    assert summary["request_throughput"] == summary["goodput"] == 0.5
    assert summary["slo_attainment"] == 0.5


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (LatencyBounds(), True),
        (LatencyBounds(ttft=1000), True),
        (LatencyBounds(ttft=999), False),
        (LatencyBounds(ttft=1000, tpot=333), False),
        (LatencyBounds(tpot=334, e2e=2000), True),
    ],
)
def test_slo_of_one_request(slo, met):
    assert slo.met(record()) is met


def test_a_stream_that_never_ended_is_a_miss():
    assert not LatencyBounds(ttft=5000).met(record(done=None))
    assert not LatencyBounds().met(record(error="cut"))


def test_slo_misses_name_the_metric_and_count_failures():
    fast = [record(i) for i in range(99)]
    assert slo_misses(fast, LatencyBounds(ttft=1000)) == []
    assert slo_misses(fast, LatencyBounds(ttft=900, tpot=400)) == ["p95 ttft 1000.0 ms > 900 ms"]
    broken = [RequestRecord(index=i, send=0.0, error="no") for i in range(4)]
    assert (
        slo_misses(fast + broken, LatencyBounds(ttft=1000)) == []
    )  # 4 of 103 fail: the p95 is still a finished one
    assert slo_misses(fast + broken * 2, LatencyBounds(ttft=1000)) == ["p95 ttft inf ms > 1000 ms"]
    assert slo_misses(broken, LatencyBounds(tpot=50)) == ["p95 tpot inf ms > 50 ms"]


def test_a_bound_without_a_sample_is_missed():
    (line,) = slo_misses([], LatencyBounds(ttft=50))
    assert line.startswith("p95 ttft is not measured")


def test_one_output_token_has_no_time_per_further_token():
    one = record(times=(11.0,), tokens=(1,))
    assert latency([one])["tpot"]["samples"] == 0
    assert latency([one])["itl_mean"]["p50"] is None
    assert LatencyBounds(tpot=1).met(one)


def test_tokens_are_counted_by_chunks_if_the_server_does_not_say():
    assert record(output_tokens=None).tokens == 4
    assert record(output_tokens=7).tokens == 7


def test_no_requests_is_not_a_crash():
    assert summarize([], LatencyBounds(ttft=1))["duration_s"] == span([]) == 0


times = st.lists(st.floats(0, 100), min_size=1, max_size=12).map(sorted)


@st.composite
def records(draw):
    chunks = [Chunk(1 + t, draw(st.integers(1, 4)), draw(st.booleans())) for t in draw(times)]
    done = chunks[-1].time + draw(st.floats(0, 5))
    return RequestRecord(index=0, send=draw(st.floats(0, 1)), chunks=chunks, done=done)


@given(st.lists(records(), min_size=1, max_size=6))
def test_metrics_keep_their_bounds(all_records):
    for definitions in DEFINITIONS:
        for row in latency(all_records, definitions).values():
            if row["samples"]:
                assert 0 <= row["p50"] <= row["p95"] <= row["p99"]
                assert math.isfinite(row["mean"])
    for r in all_records:
        if r.ok:
            assert r.first_chunk <= r.first_token <= r.last_token <= r.done
            n, table = r.tokens, DEFINITIONS["optkit"]
            if n > 1:  # TTFT + (n - 1) TPOT = E2E
                (ttft,), (tpot,), (e2e,) = (table[k].samples(r) for k in ("ttft", "tpot", "e2e"))
                assert np.isclose(ttft + (n - 1) * tpot, e2e)


@given(records())
def test_records_survive_json(one):
    assert RequestRecord.from_dict(json.loads(json.dumps(one.to_dict()))) == one
