"""Profiles of an engine on a GPU: torch's profiler for kernels, CUDA events for whole steps.

Steps are queued before the last one is done, and most are replays of captured graphs. So a profile shows kernels by
name and time, not layers, and no roofs. The time of a step is that between two events in the stream, around its work.
Without a GPU, in tests, the clock of the host takes the place of events.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from optkit.errors import UserError
from optkit.machine.paths import replace_text
from optkit.profiling.files import free_name, stem
from optkit.profiling.observer import Work
from optkit.profiling.recording import MOST_STEPS, PHASES, phase_of

MOST_KERNELS = 50  # in the report
MOST_OTHERS = 4  # steps of a phase that has enough, for each step wanted, until the profile ends


class DeviceRecording:
    """Records up to ``steps`` steps of each phase of an engine on ``device``.

    Raises:
        UserError: a number of steps out of range.
    """

    def __init__(self, device: torch.device, steps: int) -> None:
        if not 1 <= steps <= MOST_STEPS:
            raise UserError(f"{steps} steps can't be recorded", where="steps", fix=f"1 to {MOST_STEPS} can")
        self.device, self.steps = device, steps
        self.counts: Counter[str] = Counter()
        self._profiler: Any = None
        self._started: Any = None
        self._phase: str | None = None
        self._taken: list[tuple[str, Any, Any]] = []  # phase, start and end of a step
        self._is_done = False

    @property
    def is_on(self) -> bool:
        """True until all steps are recorded, or so many of one phase that the other is not to be expected."""
        enough = all(self.counts[phase] >= self.steps for phase in PHASES)
        return not (
            self._is_done or enough or max(self.counts.values(), default=0) >= MOST_OTHERS * self.steps
        )

    def begin(self) -> None:
        if self.is_on:
            if self._profiler is None:
                self._profiler = torch.profiler.profile(activities=self._activities())
                self._profiler.__enter__()
            self._started, self._phase = self._mark(), None

    def scheduled(self, work: Sequence[Work]) -> None:
        self._phase = phase_of(work) if work and self.is_on else None

    def sampled(self) -> None: ...

    def end(self) -> None:
        if self._phase is not None:
            self._taken.append((self._phase, self._started, self._mark()))
            self.counts[self._phase] += 1
            self._phase = None
            if not self.is_on:
                self.close()

    def close(self) -> None:
        """End the profile."""
        self._is_done = True
        if self._profiler is not None and self._started is not None:
            self._profiler.__exit__(None, None, None)
            self._started = None

    def _activities(self) -> list[Any]:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        return activities

    def _mark(self) -> Any:
        """A point in the stream of the device, or the time on the host's clock."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        if self.device.type != "cuda":
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def report(self, name: str) -> dict[str, Any]:
        """The times of steps by phase, and of the kernels that took longest, as JSON data."""
        on_device = "device_time_total" if self.device.type == "cuda" else "cpu_time_total"
        kernels = [
            {"name": event.key, "count": event.count, "seconds": getattr(event, on_device) / 1e6}
            for event in self._profiler.key_averages()
        ]
        kernels.sort(key=lambda kernel: -kernel["seconds"])
        phases: dict[str, list[float]] = {}
        for phase, start, end in self._taken:
            phases.setdefault(phase, []).append(self._seconds(start, end))
        return {
            "schema_version": 1,
            "artifact": name,
            "device": str(self.device),
            "phases": {phase: {"all_seconds": seconds} for phase, seconds in phases.items()},
            "kernels": kernels[:MOST_KERNELS],
        }

    def write(self, name: str, directory: Path, prefix: str) -> list[Path]:
        """Write the report and the trace; the files.

        Raises:
            OSError: the files can't be written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        place = directory / free_name(directory, stem(prefix))
        files = [Path(f"{place}.json"), Path(f"{place}.trace.json")]
        self._profiler.export_chrome_trace(str(files[1]))
        replace_text(files[0], msgspec.json.encode(self.report(name)).decode())
        return files
