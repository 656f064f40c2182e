"""Profiles of the engine process: recorded while it serves, written beside its steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from optkit.runtime.factory import open_engine
from optkit.runtime.process import ipc
from optkit.runtime.process.profiler import EngineProfiler, file_name
from optkit.runtime.types import SamplingParams
from tests.fuzz.seeds import write_seeds
from tests.support.fakes import fake_engine
from tests.support.target import not_measured  # noqa: F401 - a fixture

GREEDY = SamplingParams(max_tokens=5, temperature=0.0)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("artifacts")
    write_seeds(directory, ["llama-int8-kv"])
    return directory / "llama-int8-kv"


def test_engine_process_records_and_writes_while_it_serves(artifact: Path, tmp_path: Path) -> None:
    engine = open_engine(str(artifact))
    wanted = engine.generate([[5, 6, 7]], GREEDY)
    profiler = EngineProfiler(engine)
    asked = ipc.StopProfile("b", str(artifact), str(tmp_path))
    assert profiler.stop(asked) == ipc.Profiled("b", error="no profile was started", is_conflict=True)
    assert profiler.start(ipc.StartProfile("a", 1)) == ipc.Profiled("a")
    refused = profiler.start(ipc.StartProfile("again", 1))
    assert refused.is_conflict and refused.error
    engine.reset_prefix_cache()
    assert engine.generate([[5, 6, 7]], GREEDY) == wanted
    assert profiler.stop(asked) is None and profiler.is_writing
    assert profiler.start(ipc.StartProfile("early", 1)).is_conflict
    assert engine.generate([[5, 6, 7]], GREEDY) == wanted
    answers: list[ipc.Profiled] = []
    while not answers:
        answers = profiler.finished()
    assert answers[0].error is None and answers[0].steps == {"prefill": 1, "decode": 1}
    assert {Path(file) for file in answers[0].files} == set(tmp_path.iterdir()) and not profiler.is_writing
    assert not engine.observer.is_on


def test_profile_without_a_step_writes_nothing(artifact: Path, tmp_path: Path) -> None:
    profiler = EngineProfiler(open_engine(str(artifact)))
    profiler.start(ipc.StartProfile("a", 3))
    assert profiler.stop(ipc.StopProfile("b", str(artifact), str(tmp_path))) == ipc.Profiled("b")
    assert not list(tmp_path.iterdir())


def test_files_that_cannot_be_written_are_an_error_and_the_engine_goes_on(
    artifact: Path, tmp_path: Path
) -> None:
    engine = open_engine(str(artifact))
    profiler = EngineProfiler(engine)
    profiler.start(ipc.StartProfile("a", 1))
    engine.generate([[5, 6, 7]], GREEDY)
    (tmp_path / "file").write_text("")
    assert profiler.stop(ipc.StopProfile("b", str(artifact), str(tmp_path / "file"))) is None
    answers: list[ipc.Profiled] = []
    while not answers:
        answers = profiler.finished()
    assert "could not be written" in (answers[0].error or "") and engine.generate([[5]], GREEDY)
    assert profiler.start(ipc.StartProfile("c", 1)).error is None


def test_engine_without_a_graph_refuses() -> None:
    answer = EngineProfiler(fake_engine()).start(ipc.StartProfile("a", 3))
    assert answer.error and not answer.is_conflict


def test_names_of_models_are_parts_of_file_names() -> None:
    assert file_name("org/a model:7b") == "org_a_model_7b" and len(file_name("x" * 300)) == 64
