"""The client against scripted streams: what is recorded, in which order, and how failures look."""

import asyncio
import re
from itertools import pairwise

import pytest
from starlette.responses import JSONResponse, Response

from optkit.bench.client import problems, run_workload
from optkit.bench.workload import WorkloadConfig, build
from tests.support.fake_server import FakeServer, normal, text, usage
from tests.support.serve_fakes import SteppedEngine, served, tiny_app

IDS = list(range(1000))


def workload(**changes):
    return build(WorkloadConfig(**{"num_prompts": 3, "input_len": 8, "output_len": 4, **changes}), IDS)


def run(script, **changes):
    server, load = FakeServer(script), workload(**changes)
    with server.run() as url:
        return server, load, run_workload(url, "m", load)


def test_a_normal_stream():
    server, load, records = run(normal)
    assert [tuple(body["prompt"]) for body in server.bodies] == [r.prompt_ids for r in load.requests]
    assert all(
        body["ignore_eos"] and body["temperature"] == 0 and body["max_tokens"] == 4 for body in server.bodies
    )
    for r in records:
        assert r.ok and r.tokens == r.output_tokens == 4 and r.prompt_tokens == 8 and len(r.chunks) == 4
        times = [r.scheduled, r.send, r.headers, *(c.time for c in r.chunks), r.done]
        assert times == sorted(times)
    assert problems(records, load) == []


def test_the_first_token_is_the_first_chunk_with_text():
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    first = {"choices": [{"index": 0, "delta": {"content": "a"}}]}
    _, _, records = run(lambda _: [role, 0.05, first, 0.05, text("b"), text(""), "[DONE]"], num_prompts=1)
    (r,) = records
    assert [c.empty for c in r.chunks] == [True, False, False, True]
    assert r.first_chunk < r.first_token == r.chunks[1].time < r.last_token == r.chunks[2].time < r.done
    assert r.tokens == 2  # no usage: chunks with text are counted


def test_running_usage_counts_tokens_of_a_chunk():
    def script(_):
        for words, total in (("a", 1), ("", 2), ("bc", 4)):
            yield text(words) | {"usage": {"prompt_tokens": 8, "completion_tokens": total}}
        yield "[DONE]"

    _, _, (r,) = run(script, num_prompts=1)
    assert [c.tokens for c in r.chunks] == [1, 1, 2] and r.tokens == 4


def test_the_parts_of_the_ttft_are_those_that_an_optkit_server_tells():
    load = build(WorkloadConfig(num_prompts=2, input_len=8, output_len=4), list(range(5, 200)))
    with served(tiny_app(SteppedEngine())) as url:
        records = run_workload(url, "tiny", load)
    for r in records:
        assert r.ok, r.error
        parts = [r.ttft_details[name] for name in ("before_queue", "queue", "prefill", "chunk_wait")]
        assert 0 < sum(parts) < r.first_token - r.send
    assert run(normal)[2][0].ttft_details is None  # a server that tells none


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (lambda _: JSONResponse({"error": {"message": "too long"}}, 400), "HTTP 400.*too long"),
        (lambda _: [text("a")], r"without \[DONE\]"),
        (lambda _: ["{broken"], "JSONDecodeError"),
        (lambda _: ["[1]"], "AttributeError"),
        (lambda _: ["[" * 100_000], "RecursionError"),
        (lambda _: [{"choices": "x"}], "AttributeError"),
        (lambda _: [text("a"), {"error": {"message": "engine died"}}], "engine died"),
        (lambda _: [text(""), "[DONE]"], "no text"),
    ],
)
def test_failures_are_records(script, message):
    _, load, records = run(script)
    assert len(records) == 3
    for r in records:
        assert not r.ok
        assert re.search(message, r.error)
    assert problems(records, load) == []


def test_unicode_line_separators_do_not_cut_an_event():
    raw = '{"choices": [{"index": 0, "text": "a\u2028b\u0085c"}]}'
    _, _, (r,) = run(lambda _: [raw, "[DONE]"], num_prompts=1)
    assert r.ok and len(r.chunks) == 1


def test_a_proxy_of_the_environment_is_not_used(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    assert all(r.ok for r in run(normal)[2])


@pytest.mark.parametrize("status", [302, 303, 307])
def test_a_redirect_is_a_failed_record(status):
    """To follow would send a GET without the prompt, or count another round trip."""
    _, _, (r,) = run(lambda _: Response("moved", status, {"Location": "/v1/models"}), num_prompts=1)
    assert r.error == f"HTTP {status}: moved"


def test_an_address_may_end_with_a_slash():
    server, load = FakeServer(normal), workload(num_prompts=1)
    with server.run() as url:
        (r,) = run_workload(f"{url}/", "m", load)
    assert r.ok


def test_no_server_is_a_failed_record():
    (r,) = run_workload("http://127.0.0.1:9", "m", workload(num_prompts=1))
    assert "ClientConnectorError" in r.error


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_closed_loop_reaches_and_keeps_its_concurrency(limit):
    def script(_):
        yield text("a")
        for _ in range(1000):  # hold the stream until as many are open as may be
            if server.most_active >= limit:
                break
            yield 0.005
        yield "[DONE]"

    server, load = FakeServer(script), workload(num_prompts=6, max_concurrency=limit)
    with server.run() as url:
        assert all(r.ok for r in run_workload(url, "m", load))
    assert server.most_active == limit


def test_open_loop_sends_in_order_and_not_before_the_arrival():
    _, load, records = run(normal, num_prompts=6, request_rate=50.0, max_concurrency=None)
    for r, request in zip(records, load.requests, strict=True):
        assert r.send >= r.scheduled == pytest.approx(records[0].scheduled + request.arrival)


def test_turns_of_a_conversation_wait_for_each_other_and_hold_a_client():
    server, load, records = run(normal, num_prompts=6, turns=3, max_concurrency=1)
    assert [tuple(body["prompt"]) for body in server.bodies] == [r.prompt_ids for r in load.requests]
    assert server.most_active == 1 and [r.index for r in records] == list(range(6))
    for before, r in pairwise(records):
        assert r.send >= before.done
        assert r.index % 3 == 0 or r.scheduled >= before.done


def test_cache_hits_are_no_problem_where_prompts_share_prefixes():
    script = lambda body: [text("a"), usage(len(body["prompt"]), 4, cached=5), "[DONE]"]  # noqa: E731
    _, load, records = run(script, num_prompts=2, shared_prefix_len=6)
    assert problems(records, load) == [] and [r.cached_tokens for r in records] == [5, 5]


def test_problems_name_wrong_lengths_and_cache_hits():
    _, load, records = run(lambda body: [text("a"), usage(7, 3, cached=5), "[DONE]"], num_prompts=1)
    assert [line.split(": ", 1)[1] for line in problems(records, load)] == [
        "prompt 7, sent 8",
        "3 output tokens, asked for 4",
        "5 prompt tokens came from a cache",
    ]


def test_a_workload_runs_inside_of_a_running_event_loop_as_in_a_notebook():
    async def cell():
        return run(normal)

    _, _, records = asyncio.run(cell())
    assert len(records) == 3 and all(r.ok for r in records)


@pytest.mark.parametrize("count", ["4", [4], -5, True, 10**400, 1.5])
def test_a_count_of_tokens_that_is_none_is_a_failed_request(count: object) -> None:
    last = {"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": count}}
    _, _, records = run(lambda body: [text("a"), last, "[DONE]"], num_prompts=1)
    assert not records[0].ok and "usage counts" in str(records[0].error)
