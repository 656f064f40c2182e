"""The policy as Serve makes and pickles it."""

from __future__ import annotations

from types import SimpleNamespace

from optkit.fleet.autoscale import ReplicaLoad, metrics_of
from optkit.fleet.serve_policy import PredictedTtftPolicy


def test_options_reach_the_decision() -> None:
    late = metrics_of(ReplicaLoad(queue_seconds=9.0, backlog_seconds=9.0, utilization=1.0))
    context = SimpleNamespace(
        target_num_replicas=1,
        aggregated_metrics={name: {"a": value} for name, value in late.items()},
        policy_state={},
        current_time=1.0,
    )
    policy = PredictedTtftPolicy(ttft_seconds=1.0, min_replicas=1, max_replicas=3, up_ticks=1)
    assert policy(context)[0] > 1
    assert PredictedTtftPolicy(ttft_seconds=60.0, max_replicas=3)(context)[0] == 1
