"""The servers.

``OPTKIT_PYTHON`` is the interpreter with optkit (default: that of ``.venv``), ``OPTKIT_ARTIFACT`` the artifact of
SmolLM2-135M (default: ``artifact``).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clients.weather import ANSWER, Weather

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("OPTKIT_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
ARTIFACT = os.environ.get("OPTKIT_ARTIFACT", str(ROOT / "artifact"))
MODEL = "smollm2-135m"
SCRIPTED = ("-m", "tests.clients.scripted_server")
REAL = ("-m", "optkit.cli.main", "serve", ARTIFACT, "--port", "0", "--served-model-name", MODEL)


@dataclass(frozen=True)
class Server:
    """A live server.

    Attributes:
        url: without a path.
        model: for ``model`` in requests.
        choice: the ``tool_choice`` with which the model calls a tool. The scripted one calls on its own account;
            135M parameters seldom do.
    """

    url: str
    model: str
    choice: str

    @property
    def base(self) -> str:
        """The URL for clients of OpenAI's API."""
        return f"{self.url}/v1"

    @property
    def is_real(self) -> bool:
        return self.choice == "required"

    def check(self, weather: Weather, answer: object) -> None:
        """The loop came to its end: the tool ran, and text followed."""
        assert isinstance(answer, str) and answer.strip()
        assert weather.cities and all(isinstance(city, str) for city in weather.cities)
        if not self.is_real:
            assert (weather.cities, answer) == (["Oslo"], ANSWER)


@contextmanager
def running(arguments: Sequence[str]) -> Iterator[str]:
    """The URL of a server that the interpreter of optkit runs with ``arguments``."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([PYTHON, *arguments], stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " ready at " in line, f"the server did not start: {PYTHON} {' '.join(arguments)}"
        yield line.split(" ready at ")[1].split()[0]
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.fixture(scope="session")
def scripted() -> Iterator[Server]:
    with running(SCRIPTED) as url:
        yield Server(url, "tiny", "auto")


@pytest.fixture(scope="session")
def real() -> Iterator[Server]:
    """SmolLM2-135M."""
    with running(REAL) as url:
        yield Server(url, MODEL, "required")


@pytest.fixture(params=["scripted", "real"])
def server(request: pytest.FixtureRequest) -> Server:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Server)
    return found


@pytest.fixture
def weather() -> Weather:
    return Weather()
