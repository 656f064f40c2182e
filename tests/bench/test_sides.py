"""The sides of a benchmark, and the tokenizer of its prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from optkit.bench import sides
from optkit.bench.run import Side
from optkit.bench.sides import Described, choose_sides, described, first_side, tokenizer_directory
from optkit.errors import UserError


def ignore(_line: str) -> None:
    return


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """A directory that looks like an artifact."""
    (tmp_path / "small" / "optkit").mkdir(parents=True)
    (tmp_path / "small" / "optkit" / "manifest.json").write_text("{}")
    return tmp_path / "small"


def test_the_first_side_is_the_artifact_or_the_server_and_baselines_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sides, "baseline_sides", lambda model, progress: [Side(model), Side("transformers")])
    monkeypatch.setenv("OPTKIT_API_KEY", "secret")
    (served,) = choose_sides(first_side(None, "http://127.0.0.1:9"), None, (), ignore)
    assert (served.name, served.url, served.api_key) == ("server", "http://127.0.0.1:9", "secret")
    names = [side.name for side in choose_sides(first_side(tmp_path, None), "tiny", (), ignore)]
    assert names == ["optkit", "tiny", "transformers"]


def test_a_side_is_an_artifact_a_url_or_a_model(artifact: Path) -> None:
    assert described(str(artifact), "") == Described(artifact=artifact)
    assert described(f"fast={artifact}", "") == Described("fast", artifact=artifact)
    assert described("http://h:1/v1?a=b", "") == Described(url="http://h:1/v1?a=b")
    assert described("other=https://h", "") == Described("other", url="https://h")
    assert described("org/name", "") == Described(model="org/name")
    assert described("smollm2-135m", "").tokenizer == "smollm2-135m"


def test_any_sides_can_be_compared_and_have_different_names(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sides, "baseline_artifact", lambda model: Path("/cache") / model)
    against = [str(artifact), "http://h:1", "http://h:1", "plain=smollm2-135m", "smollm2-135m"]
    found = choose_sides(first_side(str(artifact), None), None, against, ignore)
    assert [side.name for side in found] == ["optkit", "small", "h-1", "h-1-2", "plain", "smollm2-135m"]
    assert found[2].url == "http://h:1" and found[1].command is not None
    assert str(artifact) in found[1].command(1) and "/cache/smollm2-135m" in found[5].command(1)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("first", "url"), [(None, None), (Path("a"), "http://x"), (Path("/nowhere"), None), ("./nowhere", None)]
)
def test_neither_both_or_no_directory_is_a_user_error(first: Path | str | None, url: str | None) -> None:
    with pytest.raises(UserError):
        first_side(first, url)


def test_the_tokenizer_is_given_or_that_of_the_first_side_with_one(artifact: Path) -> None:
    served = Described(url="http://x")
    assert tokenizer_directory(None, [served, Described(artifact=artifact)], "other") == str(artifact)
    with pytest.raises(UserError, match="prompts need a tokenizer"):
        tokenizer_directory(None, [served], None)
