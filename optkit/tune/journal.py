"""The journal of a tuning: a JSON line for each finished trial, appended and flushed to the disk.

A killed run resumes: ``Journal.trial`` returns the recorded outcome of a trial with a line, and runs any other trial.
All decisions follow from outcomes, so a resumed run takes the same way. An unfinished last line is cut off. The first
line names the task; a journal of another task is refused. Only a single process may hold a journal at a time.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from optkit.errors import UserError
from optkit.machine.locks import hold
from optkit.untrusted_json import parse_bounded, read_bounded

MOST_BYTES = 1 << 28
ANEW = "--force starts over"


class TrialFailed(Exception):
    """A trial without a result: the server did not start, or the recipe misses the quality bound."""


@dataclass(frozen=True)
class Trial:
    """A finished trial.

    Attributes:
        key: of the trial, as in ``round 2 ttft-cpu max_num_seqs=8``.
        result: JSON data; None for a failed trial.
        reason: of the failure; empty for a trial with a result.
        seconds: the time of the trial.
        at: seconds of the tuning, interruptions left out, at the end of the trial.
    """

    key: str
    result: Any
    reason: str
    seconds: float
    at: float


def checksum_of(line: Mapping[str, Any]) -> int:
    """The CRC-32 of a line of the journal."""
    return zlib.crc32(json.dumps(line, sort_keys=True).encode())


class Journal:
    """The finished trials of a task.

    Args:
        file: of the journal; made where missing.
        task: the facts behind the course of the search.
        fresh: forgets the trials of the file.

    Raises:
        UserError: the journal is of another task, damaged, held by another process, or can't be written.
    """

    def __init__(
        self,
        file: Path,
        task: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
        *,
        fresh: bool = False,
    ) -> None:
        self.file, self.clock = file, clock
        self.trials: dict[str, Trial] = {}
        self.resumed = 0
        self._begin = clock()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
            self._lock = hold(file)
        except OSError as error:
            what = f"the journal can't be written: {error.strerror}"
            raise UserError(what, where=str(file), fix="give another directory with -o") from error
        if self._lock is None:
            raise UserError("another optkit tune is writing it", where=str(file), fix="wait for its end")
        try:
            if fresh:
                os.truncate(file, 0)
            self._read(dict(task))
        except BaseException:
            self.close()
            raise

    def _read(self, task: dict[str, Any]) -> None:
        text = read_bounded(self.file, MOST_BYTES)
        whole = text[: text.rfind(b"\n") + 1]
        lines = [
            parse_bounded(line, f"{self.file}:{number}", "the journal is damaged: it is", ANEW)
            for number, line in enumerate(whole.splitlines(), 1)
        ]
        if len(whole) < len(text):
            os.truncate(self.file, len(whole))
        if not lines:
            self._append({"task": task})
            return
        if lines[0].get("task") != task:
            fix = "give another -o DIR, or --force to start over"
            raise UserError("it is of another task or version", where=str(self.file), fix=fix)
        for number, line in enumerate(lines[1:], 2):
            try:
                checksum = line.pop("crc32")
                trial = Trial(**line)
            except (KeyError, TypeError, AttributeError) as error:
                raise self._damaged(number) from error
            if checksum != checksum_of(line):
                raise self._damaged(number)
            self.trials[trial.key] = trial
        self.resumed = len(self.trials)
        self._begin -= max((trial.at for trial in self.trials.values()), default=0.0)

    def _damaged(self, number: int) -> UserError:
        return UserError("the journal is damaged", where=f"{self.file}:{number}", fix=ANEW)

    @property
    def elapsed(self) -> float:
        """Seconds of the tuning so far. The time between a kill and the resumption does not count."""
        return self.clock() - self._begin

    def trial(self, key: str, work: Callable[[], Any]) -> Trial:
        """The trial ``key``, recorded or run now.

        ``work`` returns JSON data or raises ``TrialFailed`` or ``UserError``; both failures are recorded.
        """
        if key in self.trials:
            return self.trials[key]
        start = self.clock()
        try:
            result, reason = json.loads(json.dumps(work())), ""
        except (TrialFailed, UserError) as error:
            result, reason = None, str(error)
        trial = Trial(key, result, reason, self.clock() - start, self.elapsed)
        line = asdict(trial)
        self._append(line | {"crc32": checksum_of(line)})
        self.trials[key] = trial
        return trial

    def _append(self, line: Mapping[str, Any]) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Release the journal."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
