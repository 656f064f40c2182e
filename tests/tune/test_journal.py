"""The journal: finished trials survive a kill at any byte, and none is run twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optkit.errors import UserError
from optkit.tune.journal import Journal, TrialFailed

TASK = {"slo": "ttft_p95<700ms@4rps", "seed": 0}


def work(number: int, done: list[int]) -> dict[str, int]:
    done.append(number)
    if number % 5 == 4:
        raise TrialFailed(f"trial {number} failed")
    return {"square": number * number}


def fill(file: Path, count: int, done: list[int]) -> list[tuple[object, str]]:
    journal = Journal(file, TASK)
    try:
        trials = [journal.trial(f"trial {n}", lambda n=n: work(n, done)) for n in range(count)]
    finally:
        journal.close()
    return [(trial.result, trial.reason) for trial in trials]


def test_trials_are_recorded_with_results_reasons_and_times(tmp_path: Path) -> None:
    done: list[int] = []
    first = fill(tmp_path / "j", 6, done)
    assert first[4] == (None, "trial 4 failed") and first[5] == ({"square": 25}, "")
    assert fill(tmp_path / "j", 6, done) == first
    assert done == list(range(6))
    lines = [json.loads(line) for line in (tmp_path / "j").read_text().splitlines()]
    assert lines[0] == {"task": TASK} and [line["key"] for line in lines[1:3]] == ["trial 0", "trial 1"]


@settings(max_examples=60)
@given(st.floats(0, 1))
def test_a_journal_cut_at_any_byte_resumes_without_repeating_a_finished_trial(
    tmp_path_factory: pytest.TempPathFactory, share: float
) -> None:
    file = tmp_path_factory.mktemp("cut") / "journal"
    whole = fill(file, 8, [])
    text = file.read_bytes()
    cut = round(share * len(text))
    file.write_bytes(text[:cut])
    finished = max(text[:cut].count(b"\n") - 1, 0)
    done: list[int] = []
    assert fill(file, 8, done) == whole
    assert done == list(range(finished, 8))
    assert fill(file, 8, done) == whole and len(done) == 8 - finished


CHILD = """
import sys, time
from pathlib import Path
from optkit.tune.journal import Journal
journal = Journal(Path(sys.argv[1]), {"task": 1})
log = open(sys.argv[2], "a")
def work(n):
    time.sleep(0.01)
    log.write(f"{n}\\n")
    log.flush()
    return n
for n in range(40):
    journal.trial(f"t{n}", lambda n=n: work(n))
"""


def test_a_process_killed_again_and_again_finishes_each_trial_once(tmp_path: Path) -> None:
    journal, log = tmp_path / "journal", tmp_path / "log"
    generator = random.Random(5)
    for _ in range(4):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(journal), str(log)])
        before = journal.stat().st_size if journal.exists() else 0
        end = time.monotonic() + 20
        while child.poll() is None and time.monotonic() < end:
            if journal.exists() and journal.stat().st_size > before + 150:
                break
            time.sleep(0.005)
        time.sleep(generator.uniform(0, 0.05))
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert subprocess.run([sys.executable, "-c", CHILD, str(journal), str(log)], check=False).returncode == 0
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [line["result"] for line in lines[1:]] == list(range(40))
    runs = [int(line) for line in log.read_text().split()]
    repeated = {n for n in runs if runs.count(n) > 1}
    assert len(repeated) <= 4, "only trials that were running at a kill run again"


def test_the_time_of_an_interruption_does_not_count(tmp_path: Path) -> None:
    now = [100.0]
    journal = Journal(tmp_path / "j", TASK, lambda: now[0])
    now[0] += 5
    assert journal.trial("a", lambda: 1).at == 5.0 == journal.elapsed
    journal.close()
    now[0] = 9000.0
    again = Journal(tmp_path / "j", TASK, lambda: now[0])
    now[0] += 2
    assert again.elapsed == 7.0 and again.resumed == 1
    again.close()


def test_a_journal_of_another_task_a_damaged_or_a_held_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "j"
    fill(file, 2, [])
    with pytest.raises(UserError, match="another task"):
        Journal(file, {"slo": "other"})
    held = Journal(file, TASK)
    with pytest.raises(UserError, match="another optkit tune"):
        Journal(file, TASK)
    held.close()
    for damage in (b'{"key": 1}\n', b"no json\n", b"[1]\n"):
        file.write_bytes(file.read_bytes().splitlines(keepends=True)[0] + damage)
        with pytest.raises(UserError, match="damaged"):
            Journal(file, TASK)
    os.remove(file)
    fill(file, 1, [])
    whole = file.read_bytes()
    for before, after in ((b'"key": "trial 0"', b'"key": "trial 1"'), (b'"at": ', b'"at": 1')):
        assert before in whole
        file.write_bytes(whole.replace(before, after))
        with pytest.raises(UserError, match="damaged"):
            Journal(file, TASK)


def test_a_fresh_journal_forgets_its_trials_but_never_those_of_a_running_process(tmp_path: Path) -> None:
    file = tmp_path / "j"
    fill(file, 3, [])
    running = Journal(file, TASK)
    before = file.read_bytes()
    with pytest.raises(UserError, match="another optkit tune"):
        Journal(file, TASK, fresh=True)
    assert file.read_bytes() == before
    running.close()
    fresh = Journal(file, {"seed": 1}, fresh=True)
    assert fresh.trials == {} and fresh.resumed == 0
    fresh.close()


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "missing" / "place")
    (tmp_path / "file").write_text("")
    for folder in ("dangling", "file", "file/below"):
        with pytest.raises(UserError, match="can't be written"):
            Journal(tmp_path / folder / "journal.jsonl", TASK)
