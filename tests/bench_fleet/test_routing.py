"""A recorded load through simulated replicas, in small: what routing by predicted TTFT gains, and never costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.fleet import routing
from optkit.bench.traces import TraceRow
from optkit.runtime.kv.digests import new_secret


def conversations(count: int, seed: int = 0) -> list[TraceRow]:
    """Conversations as in Mooncake's trace: a block that all share, growing histories, lengths over two decades."""
    draw = np.random.default_rng(seed)
    rows, number = [], 1
    histories: list[tuple[int, ...]] = []
    for at in draw.exponential(0.3, count).cumsum():
        again = bool(histories) and draw.random() < 0.5
        before = histories.pop(int(draw.integers(len(histories)))) if again else (0,)
        more = int(min(draw.lognormal(1.8, 1.0), 100)) + 1
        ids = (*before, *range(number, number + more))
        number += more
        histories.append(ids)
        histories = histories[-60:]
        rows.append(TraceRow(float(at), 512 * len(ids) - 100, 300, ids))
    return rows


def test_conversations_come_sooner_than_by_the_shortest_queue() -> None:
    secret = new_secret()
    found = routing.measure(conversations(700), routing.rules_of(secret), secret=secret)
    p50, p95 = routing.ratios(found)
    assert p50 <= 0.75 and p95 <= 0.75
    assert found["predicted TTFT"].hit_share > found["shortest queue"].hit_share


@pytest.mark.parametrize("output_scale", [0.0, 1 / 8])
def test_without_shared_prefixes_nothing_is_lost(output_scale: float) -> None:
    draw = np.random.default_rng(1)
    lengths = draw.lognormal(5.5, 0.9, 600).clip(8, 4000)
    arrivals = draw.exponential(0.2, 600).cumsum()
    rows = [TraceRow(float(at), int(n), 100) for at, n in zip(arrivals, lengths, strict=True)]
    secret = new_secret()
    found = routing.measure(
        rows, routing.rules_of(secret), secret=secret, scale=1.0, output_scale=output_scale
    )
    p50, p95 = routing.ratios(found)
    assert p50 <= routing.NO_REUSE and p95 <= routing.NO_REUSE


def test_requests_of_a_trace_share_what_their_hashes_share() -> None:
    rows = [TraceRow(10.0, 1024, 64, (7, 8)), TraceRow(12.0, 1200, 64, (7, 9, 10)), TraceRow(13.0, 600, 640)]
    first, second, third = routing.requests(rows, 1 / 32, 1 / 64, stretch=2.0)
    assert [len(r.prompt_ids) for r in (first, second, third)] == [32, 38, 19]
    assert (
        first.prompt_ids[:16] == second.prompt_ids[:16] and first.prompt_ids[16:] != second.prompt_ids[16:32]
    )
    assert not set(third.prompt_ids) & set(first.prompt_ids + second.prompt_ids)
    assert [r.arrival for r in (first, second, third)] == [0.0, 4.0, 6.0]
    assert [r.output_len for r in (first, second, third)] == [1, 1, 10]


def test_the_command_says_which_bound_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        "\n".join(
            f'{{"timestamp": {1000 * row.at}, "input_length": {row.input_len}, "output_length": 20, '
            f'"hash_ids": {list(row.hash_ids)}}}'
            for row in conversations(60)
        )
    )
    assert routing.main(["--trace", str(file), "--p50", "9", "--p95", "9"]) == 0
    assert "holds" in capsys.readouterr().out
    assert routing.main(["--trace", str(file), "--p50", "0.01"]) == 1
    assert "MISSED" in capsys.readouterr().out
