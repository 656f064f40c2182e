"""Engine processes killed from outside and by a request: the harness finds no error, no difference and two deaths."""

from __future__ import annotations

import json
from pathlib import Path

from bench.fleet.failover import MOST, Heard, main, p95


def test_a_killed_process_costs_a_pause_and_a_poison_request_two_processes(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    main(["--kills", "2", "--streams", "2", "--output-tokens", "60", "--save-result", str(result)])
    found = json.loads(result.read_text())
    assert found["kills"] == 2 and found["streams that lost their engine"] >= 1
    for name in ("client errors", "answers that differ", "poison: neighbours that failed or differ"):
        assert found[name] == 0.0, name
    assert found["poison: engines ended"] == 2.0 and found["poison: refused"] == 1.0
    assert MOST.keys() <= found.keys()


def test_the_pause_is_the_longest_time_between_outputs() -> None:
    assert Heard(times=[1.0, 1.5, 3.0, 3.1]).pause == 1.5
    assert Heard().pause == 0.0


def test_p95_is_a_measured_value() -> None:
    assert p95([float(i) for i in range(1, 101)]) == 95.0
    assert p95([3.0]) == 3.0 and p95([]) == 0.0
