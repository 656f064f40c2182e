"""The sides of a benchmark, and the tokenizer of its prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from optkit.bench import sides
from optkit.bench.run import Side
from optkit.bench.sides import choose_sides, tokenizer_directory
from optkit.errors import UserError


def ignore(_line: str) -> None:
    return


def test_the_first_side_is_the_artifact_or_the_server_and_baselines_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sides, "baseline_sides", lambda model, progress: [Side(model), Side("transformers")])
    monkeypatch.setenv("OPTKIT_API_KEY", "secret")
    (served,) = choose_sides(None, "http://127.0.0.1:9", None, ignore)
    assert (served.url, served.api_key) == ("http://127.0.0.1:9", "secret")
    names = [side.name for side in choose_sides(tmp_path, None, "tiny", ignore)]
    assert names == ["optkit", "tiny", "transformers"]


@pytest.mark.parametrize(
    ("artifact", "url"), [(None, None), (Path("a"), "http://x"), (Path("/nowhere"), None)]
)
def test_neither_both_or_no_directory_is_a_user_error(artifact: Path | None, url: str | None) -> None:
    with pytest.raises(UserError):
        choose_sides(artifact, url, None, ignore)


def test_the_tokenizer_is_given_or_the_artifact_s(tmp_path: Path) -> None:
    assert tokenizer_directory(None, tmp_path, "other") == str(tmp_path)
    with pytest.raises(UserError, match="prompts need a tokenizer"):
        tokenizer_directory(None, None, None)
