"""Profiles of the engine process: recorded between two messages, written by a thread beside the engine's steps."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optkit.errors import UserError
from optkit.profiling.observer import NoObserver
from optkit.runtime.process import ipc

if TYPE_CHECKING:
    from optkit.profiling.recording import Recording
    from optkit.runtime.cuda.profile import DeviceRecording
    from optkit.runtime.engine import Engine

logger = logging.getLogger(__name__)

WHILE_WRITING_SECONDS = 0.02  # longest sleep of the engine process while a profile is being written
ALREADY = "a profile is being recorded already; stop it first"
NONE = "no profile was started"


class EngineProfiler:
    """Records steps of ``engine``, one profile at a time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._recording: Recording | DeviceRecording | None = None
        self._writing: threading.Thread | None = None
        self._answers: list[ipc.Profiled] = []

    @property
    def is_writing(self) -> bool:
        return self._writing is not None

    def start(self, asked: ipc.StartProfile) -> ipc.Profiled:
        """Record steps from the next one on."""
        if self._recording is not None or self.is_writing:
            return ipc.Profiled(asked.request_id, error=ALREADY, is_conflict=True)
        try:
            self._recording = self.engine.observer = self._make(asked.steps)
        except UserError as error:
            return ipc.Profiled(asked.request_id, error=str(error))
        return ipc.Profiled(asked.request_id)

    def _make(self, steps: int) -> Recording | DeviceRecording:
        from optkit.profiling.recording import Recording

        model: Any = getattr(self.engine.runner, "model", None)
        if not hasattr(model, "variants"):
            raise UserError("this engine runs no graph of optkit", where="profile")
        if str(model.device) != "cpu":
            from optkit.runtime.cuda.profile import DeviceRecording

            return DeviceRecording(model.device, steps)
        return Recording(model, self.engine.config.max_num_batched_tokens, steps)

    def stop(self, asked: ipc.StopProfile) -> ipc.Profiled | None:
        """End the recording and begin to write the files; ``finished`` has the answer, unless it is known now."""
        recording, self._recording = self._recording, None
        if recording is None:
            return ipc.Profiled(asked.request_id, error=NONE, is_conflict=True)
        self.engine.observer = NoObserver()
        recording.close()
        if not recording.counts:
            return ipc.Profiled(asked.request_id)
        self._writing = threading.Thread(target=self._write, args=(asked, recording), daemon=True)
        self._writing.start()
        return None

    def _write(self, asked: ipc.StopProfile, recording: Recording | DeviceRecording) -> None:
        try:
            files = write(asked.artifact_dir, Path(asked.directory), recording)
            answer = ipc.Profiled(asked.request_id, tuple(map(str, files)), dict(recording.counts))
        except Exception:
            logger.exception("a profile could not be written")
            answer = ipc.Profiled(
                asked.request_id, error="the profile could not be written; see the server's log"
            )
        self._answers.append(answer)

    def finished(self) -> list[ipc.Profiled]:
        """The answers of profiles that have been written since the last call."""
        if self._writing is None or self._writing.is_alive():
            return []
        self._writing = None
        answers, self._answers = self._answers, []
        return answers


def write(artifact_dir: str, directory: Path, recording: Recording | DeviceRecording) -> list[Path]:
    """The files of ``recording``, steps of the artifact."""
    from optkit.artifact.open import Artifact
    from optkit.machine.present import present_target
    from optkit.profiling.files import write_profile
    from optkit.profiling.recording import Recording
    from optkit.profiling.report import make_report

    artifact = Artifact.open(artifact_dir, verify=False)
    prefix = f"{file_name(artifact.name)}-"
    if not isinstance(recording, Recording):
        return recording.write(artifact.name, directory, prefix)
    target = present_target(artifact.recipe.target)
    report = make_report(artifact.name, recording.result(), artifact.graph(), target)
    return write_profile(report, directory, prefix)


def file_name(name: str) -> str:
    """``name`` as a part of a file name."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in name)[:64]
