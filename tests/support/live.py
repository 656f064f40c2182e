"""A real server process on a loopback port: uvicorn, an engine process with a fake model, a tiny tokenizer.

Run as a program, the module serves. ``LiveServer`` starts the program and waits for the line with the address.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from optkit.runtime.process.launch import Launched, launch
from tests.support.engine_process import FACTORY
from tests.support.tiny_tokenizer import TEMPLATE, TEXT, fast_tokenizer

PATIENCE = 60.0
PATHS = ("chat_template", "ssl_certfile", "ssl_keyfile")  # options that are files
END = fast_tokenizer().token_to_id("<|im_end|>")
SCRIPT = [*fast_tokenizer().encode(TEXT).ids, END]


class LiveServer:
    """The server process.

    ``server`` are fields of ``ServeOptions``, ``engine`` options of ``tests.support.fakes.fake_engine``. The
    detokenizer raises on ``mute_token``. With ``log``, standard error of both processes goes to the file, with all
    levels from INFO on.
    """

    def __init__(
        self,
        wait: bool = True,
        silence_seconds: float = 60.0,
        max_restarts: int = 3,
        mute_token: int | None = None,
        log: Path | None = None,
        server: dict[str, Any] | None = None,
        **engine: Any,
    ) -> None:
        self._directory = tempfile.TemporaryDirectory()
        root = Path(self._directory.name)
        (root / "tokenizer.json").write_text(fast_tokenizer().to_str())
        config = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
        (root / "tokenizer_config.json").write_text(json.dumps(config))
        defaults = {"vocab_size": 512, "num_blocks": 512, "max_model_len": 512, "script": SCRIPT}
        defaults |= {"remember": False, "ttft_slo_ms": 700.0, "embeds": {"vocab_size": 16}}
        work = {
            "directory": str(root),
            "engine": defaults | engine,
            "server": server or {},
            "silence_seconds": silence_seconds,
            "max_restarts": max_restarts,
            "mute_token": mute_token,
            "log": log is not None,
        }
        command = [sys.executable, "-m", "tests.support.live", json.dumps(work)]
        strict = {**os.environ, "PYTHONWARNINGS": "error::RuntimeWarning"}  # in both processes
        with open(log, "w") if log else nullcontext() as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=strict
            )
        self.url = ""
        if wait:
            self.line = self.process.stdout.readline()  # type: ignore[union-attr]
            self.url = self.line.split(" ready at ")[1].split()[0]

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()  # type: ignore[union-attr]
        self._directory.cleanup()

    def __enter__(self) -> LiveServer:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()


def main() -> int:
    with launch(FACTORY) as launched:  # it imports while this process does, as for ``optkit serve``
        return run([launched])


def run(ready: list[Launched]) -> int:
    """Serve, with the engine process of ``ready`` first."""
    from optkit.machine import logs
    from optkit.runtime.process.client import EngineClient
    from optkit.serve import supervisor
    from optkit.serve.http.address import bind
    from optkit.serve.process import print_line
    from optkit.serve.server import ServeOptions, serve

    work = json.loads(sys.argv[1])
    if work["log"]:
        logs.configure()
    supervisor.MAX_RESTARTS, supervisor.HUNG_TIMEOUT_SECONDS = work["max_restarts"], 1.0
    supervisor.BACKOFF_SECONDS = 0.2
    break_detokenizer(work["mute_token"])
    artifact: Any = SimpleNamespace(directory=Path(work["directory"]), name="tiny", manifest={"digest": "d"})

    def make_client() -> EngineClient:
        silence = work["silence_seconds"]
        fake = json.dumps(work["engine"])
        launched = ready.pop() if ready else None
        return EngineClient(fake, factory=FACTORY, silence_seconds=silence, launched=launched)

    paths = {name: Path(value) for name, value in work["server"].items() if name in PATHS}
    options = ServeOptions(port=0, **work["server"] | paths)
    with bind(options.host, options.port) as sock:
        return serve(artifact, make_client, options, sock, print_line)


def break_detokenizer(token: int | None) -> None:
    """Make the detokenizer raise on ``token``."""
    from optkit.text.detokenizer import Detokenizer

    original = Detokenizer.push

    def broken(self: Any, token_ids: Any) -> str:
        if token in token_ids:
            raise RuntimeError("injected into the detokenizer")
        return original(self, token_ids)

    Detokenizer.push = broken  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
