"""The harness of plans: times of requests from stamps by hand, verdicts, and groups of waiting requests."""

from __future__ import annotations

from typing import Any

import pytest

from bench.plan import __main__ as plan
from bench.plan import measure, sweep
from bench.plan.__main__ import BOUNDS, medians, print_rows
from optkit.plan.virtual import Arrival


def test_the_times_of_a_request_are_those_of_its_tokens() -> None:
    found = measure.measured(1.0, [1.5, 1.6, 2.0])
    assert found.ttft == 0.5 and found.tpot == pytest.approx(0.25)
    assert found.longest_gap == pytest.approx(0.4) and found.end == 2.0
    assert measure.measured(1.0, [1.5]).tpot == 0.0


def test_a_prediction_beyond_its_bound_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = [
        {
            "measured": {"prefill 128": real, "decode at 512": 0.01},
            "shares": {"prefill 128": 0.12, "decode at 512": 0.005},
            "calibrated": {"prefill 128": real * 1.2, "decode at 512": 0.0101},
        }
        for real in (0.1, 0.2, 0.1)
    ]
    found = {"calibration_seconds": 9.0, "anchors": []} | medians(rounds)
    assert print_rows("r", found) == ["prefill 128, calibrated: +20.0%", "decode at 512, shares: -50.0%"]
    assert "( +20.0%)" in capsys.readouterr().out and BOUNDS == {"shares": 0.3, "calibrated": 0.1}
    assert found["measured"]["prefill 128"] == 0.1 and found["errors"]["calibrated"][
        "prefill 128"
    ] == pytest.approx(0.2)
    found["errors"]["shares"]["prefill 128"] = float("nan")
    assert "prefill 128, shares: +nan%" in print_rows("r", found)


def test_measurements_between_rounds_are_no_part_of_the_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]

    def measured(engine: object) -> dict[str, float]:
        now[0] += 7.0
        return {"prefill 128": now[0]}

    monkeypatch.setattr(plan, "measured", measured)
    monkeypatch.setattr(plan.time, "monotonic", lambda: now[0])
    beside = plan.Alternating(engine=None)  # type: ignore[arg-type]
    start = beside.clock()
    beside.measure()
    now[0] += 2.0
    beside.measure()
    assert beside.clock() - start == 2.0 and beside.means() == {"prefill 128": 111.5}


def test_requests_are_handed_over_in_groups() -> None:
    assert sweep.gathered([0.0, 0.1, 0.4, 0.7, 0.9], 0.3) == [0.3, 0.3, 0.7, 0.7, 1.2]
    assert sweep.gathered([0.0, 0.1], 0.0) == [0.0, 0.1]


class Echo:
    """An engine that gives each request a token a step."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.left)

    def add_request(self, request: Any) -> None:
        self.left[request.request_id] = request.sampling.max_tokens

    def step(self) -> list[Any]:
        from optkit.runtime.types import TokenOutput

        outputs = [TokenOutput(request_id=name, token_ids=(1,)) for name in self.left]
        self.left = {name: count - 1 for name, count in self.left.items() if count > 1}
        return outputs


def test_each_request_is_measured_from_its_arrival() -> None:
    engine: Any = Echo()
    arrivals = [Arrival(0.0, 4, 3), Arrival(0.02, 4, 2)]
    first, second = measure.serve(engine, arrivals)
    assert 0 <= first.ttft < 0.02 and 0 <= second.ttft < 0.02 and second.end >= 0.02
    late = measure.serve(engine, arrivals, sent=[0.0, 0.0])
    assert late[1].ttft >= 0.02
    assert measure.wave(engine, 2, 4, 3)["output_tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--artifact", "artifact/"], "--artifact artifact/: give RECIPE=DIR"),
        (["--artifact", "other=artifact/"], "--artifact other: give RECIPE=DIR"),
        (["--rounds", "0"], "--rounds 0: give 1 or more"),
    ],
)
def test_wrong_options_are_usage_errors(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        plan.main(["smollm2-135m", *options])
    assert ended.value.code == 2 and message in capsys.readouterr().err
