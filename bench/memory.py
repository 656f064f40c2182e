"""Peak memory of a command, by the last line that the command printed: ``optkit optimize`` prints a line for each step.

    python -m bench.memory -- optkit optimize MODEL --recipe ttft-cpu -o DIR

The resident memory of the command and its children is read from /proc ten times a second (Linux). Anonymous memory
(``anon``) belongs to the processes alone. The rest (``file``) are pages of mapped files: the kernel takes mapped pages
back when memory is short. With ``--json`` the rows are printed as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.figures import command_line

INTERVAL_SECONDS = 0.1
FIELDS = {"VmRSS": "rss", "RssAnon": "anon", "RssFile": "file"}


@dataclass
class Row:
    """The peaks of a step, in bytes. ``rss`` is the largest sum, which the peaks of both parts need not add up to."""

    step: str
    seconds: float = 0.0
    rss: int = 0
    anon: int = 0
    file: int = 0

    def add(self, sample: dict[str, int]) -> None:
        for name, value in sample.items():
            setattr(self, name, max(getattr(self, name), value))


def memory_of(pid: int) -> dict[str, int]:
    """Bytes of process ``pid`` and its children, by the names of ``FIELDS``; zeros for a process that has ended."""
    total = dict.fromkeys(FIELDS.values(), 0)
    for one in [pid, *children_of(pid)]:
        try:
            lines = Path(f"/proc/{one}/status").read_text("utf-8").splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, value = line.partition(":")
            if key in FIELDS:
                total[FIELDS[key]] += int(value.split()[0]) * 1024
    return total


def children_of(pid: int) -> list[int]:
    """The processes below ``pid``."""
    try:
        files = list(Path(f"/proc/{pid}/task").glob("*/children"))
        below = [int(child) for file in files for child in file.read_text("utf-8").split()]
    except OSError:
        return []
    return below + [grandchild for child in below for grandchild in children_of(child)]


def measure(command: list[str]) -> tuple[list[Row], int]:
    """A row for each line that ``command`` prints, and the exit status; the lines go to standard error."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    rows, started = [Row("start")], time.monotonic()
    done = threading.Event()

    def sample() -> None:
        while not done.wait(INTERVAL_SECONDS):
            rows[-1].add(memory_of(process.pid))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    assert process.stdout is not None  # a pipe was asked for
    for line in process.stdout:
        now = time.monotonic()
        rows[-1].seconds = now - started
        started = now
        rows.append(Row(line.rstrip()))
        print(line, end="", file=sys.stderr, flush=True)
    status = process.wait()
    rows[-1].seconds = time.monotonic() - started
    done.set()
    thread.join()
    return rows, status


def main() -> int:
    parser = command_line("bench.memory", __doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    command = [word for index, word in enumerate(arguments.command) if index or word != "--"]
    rows, status = measure(command)
    peak = Row("peak", sum(row.seconds for row in rows))
    for row in rows:
        peak.add({name: getattr(row, name) for name in FIELDS.values()})
    if arguments.json:
        print(json.dumps([asdict(row) for row in [*rows, peak]], indent=1))
        return status
    for row in [*(row for row in rows if row.rss), peak]:
        sizes = "".join(f"{getattr(row, name) / 1e9:8.2f}" for name in FIELDS.values())
        print(f"{row.seconds:8.1f} s{sizes}  {row.step[:110]}")
    print(f"{'seconds':>10}{'rss':>8}{'anon':>8}{'file':>8}  GB; load {os.getloadavg()[0]:.1f}")
    return status


if __name__ == "__main__":
    sys.exit(main())
