"""Two artifacts behind one port: processes, the tokens of transformers, a crash, a failing load, the end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

import optkit
from optkit.artifact.open import Artifact
from optkit.errors import UserError
from optkit.serve.models.server import NamedArtifact, PoolOptions, check_budget, open_models, run_models
from optkit.serve.server import ServeOptions
from optkit.serve.shutdown import RequestsInFlight
from tests.support.lifecycle import assert_gone, wait_until
from tests.support.live import PATIENCE
from tests.support.model_directory import save_model
from tests.support.quick import quick
from tests.support.tiny_tokenizer import fast_tokenizer

RECIPE: dict[str, Any] = {
    "name": "tiny",
    "workload": {"prompt_tokens": [16], "output_tokens": 2},
    "runtime": {"block_size": 8, "max_num_batched_tokens": 64, "kv_cache_bytes": "1MiB"},
    "serving": {"threads": 1},
}
ARCHITECTURES = {"first": "llama", "second": "qwen2"}
PROMPT, COUNT = "the cat sat on the mat", 12


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("sources")
    return {name: save_model(directory / name, kind) for name, kind in ARCHITECTURES.items()}


@pytest.fixture(scope="module")
def artifacts(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Float artifacts, so that transformers gives the same answers."""
    directory = tmp_path_factory.mktemp("artifacts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPTKIT_CACHE", str(directory / "cache"))
        quick(patch.setattr)
        for name, source in sources.items():
            recipe = optkit.recipe(passes={"fuse_qkv": {}}, **RECIPE)
            optkit.optimize(source, recipe, directory / name, quality_tokens=1024)
    return {name: directory / name for name in sources}


class Served:
    """``optkit serve`` with both artifacts; ``url`` once it listens."""

    def __init__(self, artifacts: dict[str, Path], *flags: str) -> None:
        named = [f"{name}={directory}" for name, directory in artifacts.items()]
        command = [sys.executable, "-m", "optkit.cli.main", "serve", *named, "--port", "0", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
        assert self.process.stdout
        self.line = self.process.stdout.readline()
        self.url = self.line.split(" ready at ")[1].split()[0]

    def ask(self, model: str, **more: Any) -> httpx.Response:
        body = {"model": model, "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True}
        return httpx.post(f"{self.url}/v1/completions", json=body | more, timeout=PATIENCE)

    def tokens(self, model: str) -> list[int]:
        answer = self.ask(model)
        assert answer.status_code == 200, answer.text
        ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return ids

    def states(self) -> dict[str, str]:
        cards = httpx.get(f"{self.url}/v1/models").json()["data"]
        return {card["id"]: card["status"]["value"] for card in cards}

    def engines(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()


@pytest.fixture(scope="module")
def served(artifacts: dict[str, Path]) -> Iterator[Served]:
    server = Served(artifacts, "--memory-budget", "4GiB")
    yield server
    server.process.kill()
    server.process.wait()


@pytest.fixture(scope="module")
def expected(sources: dict[str, Path]) -> dict[str, list[int]]:
    """The greedy tokens of transformers."""
    from transformers import AutoModelForCausalLM

    found = {}
    ids = fast_tokenizer().encode(PROMPT, add_special_tokens=False).ids
    for name, source in sources.items():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, local_files_only=True)
        with torch.no_grad():
            options = {"max_new_tokens": COUNT, "do_sample": False, "eos_token_id": None}
            found[name] = model.eval().generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()
    assert found["first"] != found["second"]
    return found


def test_port_listens_before_any_model_is_loaded(served: Served) -> None:
    assert served.line.startswith("first, second ready at http://127.0.0.1:")
    assert "loaded on demand within 4096 MiB" in served.line
    assert served.states() == {"first": "unloaded", "second": "unloaded"}
    assert served.engines() == []


def test_simultaneous_requests_get_the_tokens_of_their_model(
    served: Served, expected: dict[str, list[int]]
) -> None:
    names = ["first", "second"] * 3
    with ThreadPoolExecutor(len(names)) as threads:
        answers = list(threads.map(served.tokens, names))
    assert answers == [expected[name] for name in names]
    assert len(served.engines()) == 2


def test_crash_of_one_engine_leaves_the_other_alone(served: Served, expected: dict[str, list[int]]) -> None:
    served.tokens("second")
    before = served.engines()
    body = {"model": "second", "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
    [victim] = [engine for engine in before if _has_files(engine, "first")]
    assert len(before) == 2
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=PATIENCE) as stream:
        lines = stream.iter_lines()
        next(lines)
        victim.kill()
        rest = list(lines)
    assert [line for line in rest if line][-1] == "data: [DONE]"
    assert not any('"error"' in line for line in rest)
    wait_until(lambda: served.ask("first").status_code == 200)
    assert served.tokens("first") == expected["first"]
    assert served.tokens("second") == expected["second"]
    assert not victim.is_running()
    assert all(engine in served.engines() for engine in before if engine != victim)


def _has_files(engine: psutil.Process, name: str) -> bool:
    """The engine has files of the artifact ``name`` mapped or open."""
    files = [found.path for found in engine.memory_maps()] + [found.path for found in engine.open_files()]
    return any(f"/{name}/" in file for file in files)


def test_end_stops_all_engines(artifacts: dict[str, Path], expected: dict[str, list[int]]) -> None:
    server = Served(artifacts, "--idle-timeout", "1", "--memory-budget", "300MiB")
    assert server.tokens("first") == expected["first"]
    assert server.tokens("second") == expected["second"]  # there is memory for one
    assert server.states() == {"first": "unloaded", "second": "loaded"}
    wait_until(lambda: server.states()["second"] == "unloaded")
    wait_until(lambda: server.engines() == [])
    assert server.tokens("first") == expected["first"]
    engines = server.engines()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE) == 0
    assert_gone(engines)


def test_artifact_in_the_place_of_another_is_served_from_its_own_load_on(
    artifacts: dict[str, Path], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    """Never an engine of one artifact behind tokenizer and kept answers of the other."""
    place = tmp_path / "place"
    shutil.copytree(artifacts["first"], place)
    server = Served({"it": place}, "--memory-budget", "4GiB", "--response-cache", "1MiB")
    try:
        assert [server.tokens("it"), server.tokens("it")] == [expected["first"]] * 2
        shutil.rmtree(place)
        shutil.copytree(artifacts["second"], place)
        assert server.tokens("it") == expected["first"]  # loaded before, and kept
        embeddings = {"model": "it", "input": PROMPT}
        refused = httpx.post(f"{server.url}/v1/embeddings", json=embeddings, timeout=PATIENCE)
        assert refused.status_code == 400 and "another artifact" in refused.json()["error"]["message"]
        assert str(tmp_path) not in refused.text
        server.engines()[0].kill()
        wait_until(lambda: server.states()["it"] == "unloaded")
        answer = server.ask("it")
        assert answer.headers["x-optkit-cache"] == "miss"
        assert answer.json()["choices"][0]["token_ids"] == expected["second"]
    finally:
        server.process.kill()
        server.process.wait()


def test_signal_during_a_load_leaves_no_process(artifacts: dict[str, Path]) -> None:
    server = Served(artifacts, "--memory-budget", "4GiB")
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(server.ask, "first")
        wait_until(lambda: server.states()["first"] == "loading" and len(server.engines()) > 0)
        engines = server.engines()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
        assert_gone(engines)
        assert asked.result().json()["error"]["code"] == "server_shutdown"


def models(artifacts: list[NamedArtifact], **options: Any) -> list[Any]:
    return open_models(artifacts, ServeOptions(**options), RequestsInFlight())


def test_names_must_tell_the_artifacts_apart(artifacts: dict[str, Path]) -> None:
    twice = [NamedArtifact(artifacts["first"]), NamedArtifact(artifacts["first"])]
    with pytest.raises(UserError, match="stands for 2 artifacts"):
        models(twice)
    with pytest.raises(UserError, match="it names one artifact"):
        models(twice, served_model_names=("a",))
    named = models([NamedArtifact(artifacts["first"]), NamedArtifact(artifacts["first"], "other")])
    own = Artifact.open(artifacts["first"]).name
    assert [model.name for model in named] == [own, "other"]


def test_alias_belongs_to_a_single_artifact(artifacts: dict[str, Path]) -> None:
    [model] = models([NamedArtifact(artifacts["first"], "own")], served_model_names=("alias",))
    assert model.names == ("own", "alias")


def test_model_beyond_the_budget_is_refused_at_the_start(artifacts: dict[str, Path]) -> None:
    found = models([NamedArtifact(artifacts["first"], "one")])
    with pytest.raises(UserError, match=r"one needs about 257 MiB, the budget is 100 MiB"):
        check_budget(found, 100 << 20, given=True)


def test_missing_chat_template_is_told_at_the_start(artifacts: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the chat template cannot be read"):
        options = ServeOptions(port=0, chat_template=tmp_path / "none.jinja")
        run_models([NamedArtifact(artifacts["first"])], options, PoolOptions())


def test_no_artifact_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such directory"):
        run_models([NamedArtifact(tmp_path / "none")] * 2, ServeOptions(port=0), PoolOptions())
