"""The best options of a peer, found by trial once for each model and instruction set.

A trial is a small run of its own: a server for each candidate, all frozen but one, and interleaved rounds of a prompt
of 1024 tokens with 32 output tokens. The candidate with the lowest median time is the best. The outcome is kept below
``.peers/models/``, so later runs need no trials.

The servers of a large model do not fit the memory together. Such candidates run one after another, with a shorter
prompt, which is still longer than the smallest micro-batch.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.peers.measure import Run
from bench.peers.peer import Model, Peer, Progress
from bench.peers.result import Measured, why_missing
from optkit.bench.workload import WorkloadConfig
from optkit.errors import UserError
from optkit.machine.target import memory_bytes

TRIAL = WorkloadConfig(num_prompts=1, input_len=1024, output_len=32, seed=7)
ROUNDS = 5
TRIAL_ALONE = WorkloadConfig(num_prompts=1, input_len=512, output_len=16, seed=7)
ROUNDS_ALONE = 2


def choose_options(peer: Peer, model: Model, ids: Sequence[int], progress: Progress) -> None:
    """Set ``peer.options`` and ``peer.trials`` from the kept trials, or from new ones.

    Raises:
        UserError: no candidate answered.
    """
    if not peer.candidates():
        return
    file = trials_file(peer, model)
    if missing(peer, model):
        progress(f"{peer.name}: trying {len(peer.candidates())} sets of options")
        trials = try_candidates(peer, model, ids, progress)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(trials, indent=1) + "\n", "utf-8")
    peer.trials = json.loads(file.read_text("utf-8"))
    peer.options = best(peer.trials, peer.name)


def trials_file(peer: Peer, model: Model) -> Path:
    return model.cache / f"{peer.name}.{peer.isa}.trials.json"


def missing(peer: Peer, model: Model) -> bool:
    """True for a peer with candidates that were not tried yet."""
    return bool(peer.candidates()) and not trials_file(peer, model).exists()


def forget(peers: Sequence[Peer], model: Model) -> None:
    """Make the next ``choose_options`` try the candidates again."""
    for peer in peers:
        trials_file(peer, model).unlink(missing_ok=True)


def try_candidates(peer: Peer, model: Model, ids: Sequence[int], progress: Progress) -> dict[str, Any]:
    """The load average before the trials, and each candidate's options with seconds or the reason for a failure.

    Raises:
        UserError: no candidate's server could be started.
    """
    sides = []
    for number, options in enumerate(peer.candidates(), 1):
        side = copy.copy(peer)
        side.name, side.options = f"{peer.name}, candidate {number}", options
        sides.append(side)
    together = fit_together(model, len(sides))
    trial, rounds = (TRIAL, ROUNDS) if together else (TRIAL_ALONE, ROUNDS_ALONE)
    rows: list[dict[str, Any]] = []
    loads: list[float] = []
    for group in [sides] if together else [[side] for side in sides]:
        try:
            measured = Run(model, {"trial": trial}, rounds, ids, progress, starts=1).measure(group, {})
        except UserError as error:
            rows += [{"options": side.options, "failed": str(error)} for side in group]
            continue
        rows += [{"options": side.options, **outcome(side.name, measured)} for side in group]
        loads.append(measured.environment["load_average"])
    if not loads:
        raise UserError("no candidate could be started", where=peer.name, fix="the reasons are above")
    length = {"input_len": trial.input_len, "output_len": trial.output_len}
    return {"load_average": loads[0], "rounds": rounds, "together": together, **length, "candidates": rows}


def fit_together(model: Model, count: int) -> bool:
    """True where the weights of ``count`` servers, as large as the checkpoint, fit half of the memory."""
    size = sum(file.stat().st_size for file in model.directory.glob("*.safetensors"))
    return count * size <= memory_bytes() // 2


def outcome(name: str, measured: Measured) -> dict[str, Any]:
    """The seconds of a candidate, or the reason for a missing time."""
    result = measured.results["trial"]
    spread = result.statistic(name, ("latency_ms", "e2e", "p50")) if name in result.sides else None
    if spread:
        return {"seconds": spread["median"] / 1e3}
    return {"failed": measured.skipped.get(name) or why_missing(result, name)}


def best(trials: Mapping[str, Any], name: str) -> dict[str, str]:
    """The options of the fastest candidate.

    Raises:
        UserError: no candidate has a time.
    """
    finished = [row for row in trials["candidates"] if "seconds" in row]
    if not finished:
        raise UserError("no set of options answered", where=name, fix="try again with --retune")
    return dict(min(finished, key=lambda row: row["seconds"])["options"])
