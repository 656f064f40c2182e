"""What holds for all tests."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated: before any is imported
torch.set_num_threads(1)  # tiny matrices are faster without handing work over, and much so on a busy machine
# pytest adds handlers to loggers that do not propagate, and with a handler torch describes every step of a trace.
logging.getLogger("torch.__trace").propagate = True
hypothesis.settings.register_profile("patient", deadline=None)  # by default 0.2 s for an example is a failure
hypothesis.settings.load_profile("patient")

CAPTURING = (
    "tests/calibration/",
    "tests/capture/",
    "tests/checkpoint/",
    "tests/evaluation/",
    "tests/graph/",
    "tests/lowering/",
    "tests/parallel/",
    "tests/passes/",
    "tests/runtime/cuda/test_runner.py",
    "tests/runtime/kv/test_exchange.py",
    "tests/runtime/kv/test_rolling.py",
    "tests/runtime/specprefill/",
    "tests/runtime/test_captured_model.py",
    "tests/runtime/test_embedding.py",
    "tests/runtime/test_endless.py",
    "tests/runtime/test_hidden_graph.py",
)
API = "tests/api/"  # its fixtures are the package's
ISA = os.environ.get("OPTKIT_CPU_ISA") or None  # of the session
EMBEDDED = ("tests/checkpoint/test_locate.py", "tests/test_real_model.py", "tests/text/test_tokenizer.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of several processes one has all tests that capture the same models, or convert the embedded one.

    The other tests are shared out by file, for their fixtures; those of the Python API by folder.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(CAPTURING + EMBEDDED):
                return "models"
            return API if nodeid.startswith(API) else nodeid.split("::")[0]

    return ByFile(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Hide modules and tests, a million objects that live to the end, from the garbage collector.

    A full collection takes 0.6 s with them, and every opened engine makes one.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """After each file, and after a test for which a model was traced, free garbage and hide what lives on."""
    before = num_traced()
    done = yield
    traced = num_traced() > before and item.nodeid.startswith(
        CAPTURING
    )  # tiny models, which may be garbage later
    if nextitem is None or nextitem.path != item.path or traced:
        gc.collect()
        gc.freeze()
    return done


def num_traced() -> int:
    """Programs in the cache of ``exported_once``."""
    exported = sys.modules.get("tests.support.exported")
    return len(exported.PROGRAMS) if exported else 0


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests of kernels ask for more, and leave one behind."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def one_instruction_set() -> Iterator[None]:
    """Tests of kernels choose others, and leave the one of the session behind."""
    yield
    native = sys.modules.get("optkit.kernels.cpu.native")
    if native and native.available():
        native.set_isa(ISA)


@pytest.fixture(scope="session", autouse=True)
def reopened_in_new_process() -> Iterator[Callable[[Path], torch.Tensor]]:
    """Artifacts are checked as they are written, those of fixtures too, but without a process each, of seconds.

    The value is what they are checked with in use, which starts a process.
    """
    from optkit.pipeline import check
    from tests.support.quick import reopen_here

    in_use = check.reopened_logits
    with pytest.MonkeyPatch.context() as patch:
        reopen_here(patch.setattr)
        yield in_use


@pytest.fixture(autouse=True)
def reopened_as_marked(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    reopened_in_new_process: Callable[[Path], torch.Tensor],
) -> None:
    """What a test with the marker writes is checked as in use."""
    if request.node.get_closest_marker("new_process"):
        monkeypatch.setattr("optkit.pipeline.check.reopened_logits", reopened_in_new_process)


@pytest.fixture(scope="session", autouse=True)
def exported_once() -> Iterator[None]:
    """Each model is traced once in a session, if any test needs it; see ``tests.support.exported``."""
    module = sys.modules.get("optkit.capture.export")
    if module is None:
        yield
        return
    from tests.support.exported import ExportOnce

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "export", ExportOnce(module.export))
        yield
