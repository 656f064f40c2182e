"""``optkit serve`` passes each flag on to the server, and ends with the server's exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from optkit.cli.main import run
from optkit.cli.serve import ReasoningParser, ToolCallParser, name_and_directory
from optkit.machine import logs
from optkit.runtime.process import launch
from optkit.serve import server
from optkit.serve.models.server import NamedArtifact, PoolOptions
from optkit.serve.server import ServeOptions
from optkit.serve.tools.formats import AUTO, FORMATS, REASONING_PARSERS


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls that ``optkit serve`` makes: start and end of the engine process, artifact and options."""
    calls: list[Any] = []

    @contextmanager
    def launched(artifact: str) -> Iterator[str]:
        calls.append("launch")
        try:
            yield "engine"
        finally:
            calls.append("left")

    def serve(artifact: Path, options: ServeOptions, launched: str) -> int:
        calls.append((artifact, options, launched))
        return 3

    monkeypatch.setattr(launch, "launch", launched)
    monkeypatch.setattr(server, "run", serve)
    monkeypatch.setattr(logs, "configure", lambda format: calls.append(("logs", format)))
    monkeypatch.delenv("OPTKIT_API_KEY", raising=False)
    return calls


def test_serve_without_flags_has_the_defaults_of_the_server(served: list[Any]) -> None:
    assert run(["serve", "somewhere"]) == 3
    assert served == [
        ("logs", "text"), "launch", (Path("somewhere"), ServeOptions(), "engine"), "left",
    ]  # fmt: skip


def test_serve_passes_every_flag_on(served: list[Any], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    flags = {
        "--host": "0.0.0.0",
        "--port": "0",
        "--threads": "3",
        "--api-key-file": str(keys),
        "--max-queue": "5",
        "--request-timeout": "1.5",
        "--log-format": "json",
        "--otlp-traces-endpoint": "http://localhost:4318/v1/traces",
        "--shutdown-timeout": "7",
        "--max-num-seqs": "4",
        "--tool-call-parser": "hermes",
        "--reasoning-parser": "qwen3",
        "--chat-template": "template.jinja",
        "--generation-config": "none",
        "--root-path": "/llm",
        "--ssl-certfile": "own.pem",
        "--ssl-keyfile": "own.key",
        "--response-cache": "256MiB",
    }
    names = ["--served-model-name", "a", "--served-model-name", "b"]
    names += ["--allowed-origins", "https://a", "--allowed-origins", "https://b"]
    assert run(["serve", "here", *names, *(word for flag in flags.items() for word in flag)]) == 3
    assert served[:2] == [("logs", "json"), "launch"]
    assert served[2][1] == ServeOptions(
        host="0.0.0.0",
        port=0,
        served_model_names=("a", "b"),
        api_keys=("one", "two"),
        max_queue=5,
        request_timeout=1.5,
        shutdown_timeout=7,
        otlp_traces_endpoint="http://localhost:4318/v1/traces",
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        chat_template=Path("template.jinja"),
        generation_config="none",
        allowed_origins=("https://a", "https://b"),
        root_path="/llm",
        ssl_certfile=Path("own.pem"),
        ssl_keyfile=Path("own.key"),
        response_cache_bytes=256 << 20,
        engine={"max_num_seqs": 4, "threads": 3},
    )


def test_name_before_a_single_artifact_is_its_first_name(served: list[Any]) -> None:
    assert run(["serve", "chat=somewhere", "--served-model-name", "alias"]) == 3
    assert served[2][:2] == (Path("somewhere"), ServeOptions(served_model_names=("chat", "alias")))


@pytest.fixture
def models_served(monkeypatch: pytest.MonkeyPatch, served: list[Any]) -> list[Any]:
    """The calls of a server of several models; ``served`` stays without an engine process."""
    from optkit.serve.models import server as models

    calls: list[Any] = []

    def run_models(*arguments: Any) -> int:
        calls.append(arguments)
        assert served == [("logs", "text")]
        return 4

    monkeypatch.setattr(models, "run_models", run_models)
    return calls


def test_several_artifacts_are_loaded_on_demand(models_served: list[Any]) -> None:
    assert run(["serve", "small=a", "b", "--served-model-name", "x", "--threads", "2"]) == 4
    named = [NamedArtifact(Path("a"), "small"), NamedArtifact(Path("b"))]
    options = ServeOptions(served_model_names=("x",), engine={"threads": 2})
    assert models_served == [(named, options, PoolOptions())]


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (["--memory-budget", "2GiB"], PoolOptions(memory_budget=2 << 30)),
        (["--idle-timeout", "0"], PoolOptions(idle_timeout=0)),
        (["--load-timeout", "7.5"], PoolOptions(load_timeout=7.5)),
    ],
)
def test_options_of_memory_load_a_single_artifact_on_demand(
    models_served: list[Any], flags: list[str], options: PoolOptions
) -> None:
    assert run(["serve", "chat=a", *flags]) == 4
    assert models_served == [([NamedArtifact(Path("a"), "chat")], ServeOptions(), options)]


@pytest.mark.parametrize("arguments", [["a", "--memory-budget", "much"], ["=a"], ["name="], ["\t=a"]])
def test_wrong_name_or_size_is_refused(models_served: list[Any], arguments: list[str]) -> None:
    assert run(["serve", *arguments]) == 2
    assert models_served == []


def test_path_with_an_equals_sign_is_a_path_where_it_exists(tmp_path: Path) -> None:
    directory = tmp_path / "a=b"
    assert name_and_directory(str(directory)) == (f"{tmp_path}/a", Path("b"))
    directory.mkdir()
    assert name_and_directory(str(directory)) == (None, directory)


def test_names_of_parsers_are_those_of_the_formats() -> None:
    assert {choice.value for choice in ToolCallParser} == {AUTO, *FORMATS}
    assert {choice.value for choice in ReasoningParser} == {AUTO, *REASONING_PARSERS}


def test_serve_with_an_unreadable_key_file_serves_nothing(served: list[Any], tmp_path: Path) -> None:
    assert run(["serve", "here", "--api-key-file", str(tmp_path / "none")]) == 2
    assert served == [("logs", "text"), "launch", "left"]


@pytest.mark.parametrize("value", ["lots", "256", "1023KiB"])
def test_a_response_cache_without_a_size_serves_nothing(
    served: list[Any], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", "here", "--response-cache", value]) == 2
    assert served == [("logs", "text"), "launch", "left"] and "--response-cache" in capsys.readouterr().err


def test_replicas_are_of_one_artifact(served: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "a=one", "b=two", "--replicas", "2"]) == 2
    assert "replicas are of one artifact" in capsys.readouterr().err
    assert "launch" not in served
