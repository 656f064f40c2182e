"""A recipe run in a child process, killed on the way, and the messages about its work.

``python -m tests.support.killed_run SOURCE OUT LOG PHASE DELAY`` runs ``RUN_PASSES`` and ends by SIGKILL, DELAY seconds
into PHASE or at the end of PHASE, the earlier of the two. If PHASE is already finished, the next unfinished phase
counts. Phases are ``capture``, the passes, ``whole`` and ``write``. Every message goes to LOG, a JSON list a line,
before the announced work begins.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from optkit.pipeline.driver import optimize
from tests.support.quick import quick
from tests.support.small_runs import ONE_PROMPT, recipe

PASSES = ("fuse_qkv", "prune_ffn", "smoothquant", "awq", "mixed_precision", "kv_int8")
PHASES = ("capture", *PASSES, "whole", "write")
RUN_PASSES = """
passes:
  fuse_qkv: {}
  prune_ffn: {ffn: 0.3, multiple: 32, calibration: {samples: 4, length: 32}}
  smoothquant: {calibration: {samples: 4, length: 32}}
  awq: {scheme: W4A16, group_size: 32, ignore: ["re:.*mlp"], calibration: {samples: 8, length: 32}}
  mixed_precision:
    {schemes: ["W4A8:32", "W8A8:32"], bits: 7, sensitivity_tokens: 32, calibration: {samples: 8, length: 32}}
  kv_int8: {}
"""
# Where a pass keeps what it has finished, and how its messages about that begin.
STAGES = {
    "prune_ffn: ": "channels",
    "smoothquant: ": "smoothing",
    "awq: scale of ": "scales",
    "awq: ": "codes",
    "mixed_precision: sensitivity of ": "sensitivity",
    "mixed_precision: ": "codes",
}
Message = tuple[float, str, tuple[int, int] | None]


def run(source: Path, out: Path, hear: Callable[[Message], None] | None = None) -> list[Message]:
    """Run the recipe on ``source``; return every message with its time."""
    messages: list[Message] = []

    def progress(text: str, /, *, part: tuple[int, int] | None = None) -> None:
        messages.append((time.monotonic(), text, part))
        if hear:
            hear(messages[-1])

    optimize(
        str(source), recipe(RUN_PASSES, ONE_PROMPT), out, force=True, progress=progress, final_tokens=512
    )
    return messages


def phase_of(text: str, before: str) -> str:
    """The phase announced by a message, or the continued phase ``before``."""
    name, _, what = text.partition(": ")
    if text.startswith("capturing"):
        return "capture"
    if text.startswith("writing "):
        return "write"
    if name == "whole" or what.startswith("rewriting"):
        return name
    return before


def worked_on(messages: list[Message]) -> list[str]:
    """The passes with work."""
    return [text.partition(": ")[0] for _, text, _ in messages if ": rewriting" in text]


def worked_groups(messages: list[Message], name: str) -> dict[str, list[int]]:
    """The groups of layers with work by pass ``name``, by stage."""
    found: dict[str, list[int]] = {}
    for _, text, part in messages:
        stage = next((stage for prefix, stage in STAGES.items() if text.startswith(prefix)), None)
        if part is not None and stage is not None and text.startswith(f"{name}: "):
            found.setdefault(stage, []).append(part[0])
    return found


# -- the process that dies ---------------------------------------------------------------------------------


def killed(
    source: Path, out: Path, cache: Path, phase: str, delay: float, *, forked: bool = False
) -> list[Message]:
    """Run in a child process killed in ``phase``; return the messages.

    Args:
        forked: start the child as a fork, which has imported everything and exported the model already.
    """
    log = cache / "log"
    log.unlink(missing_ok=True)
    words = [str(source), str(out), str(log), phase, str(delay)]
    code, errors = by_fork(words, cache) if forked else by_command(words, cache)
    assert code == -signal.SIGKILL, errors
    return [(at, text, part) for at, text, part in map(json.loads, log.read_text().splitlines())]


def by_command(words: list[str], cache: Path) -> tuple[int, str]:
    """Exit code and last errors of a new process."""
    command = [sys.executable, "-m", "tests.support.killed_run", *words]
    environment = os.environ | {"OPTKIT_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr[-2000:]


def by_fork(words: list[str], cache: Path) -> tuple[int | None, str]:
    """Exit code of a forked process, which writes to standard error itself."""

    def child() -> None:
        os.environ["OPTKIT_CACHE"] = str(cache)
        main(*words)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    return process.exitcode, "see standard error"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(source: str, out: str, log: str, phase: str, delay: str) -> None:
    torch.set_num_threads(1)
    quick()
    current, timer = "start", threading.Timer(float(delay), die)

    def hear(message: Message) -> None:
        nonlocal current
        now = phase_of(message[1], current)
        if timer.is_alive() and now != current:
            die()
        with open(log, "a", encoding="utf-8") as stream:
            print(json.dumps(message), file=stream)
        if now in PHASES[PHASES.index(phase) :] and not timer.is_alive():
            timer.start()
        current = now

    timer.daemon = True
    run(Path(source), Path(out), hear)
    die()  # the last phase ended before its time


if __name__ == "__main__":
    main(*sys.argv[1:])
