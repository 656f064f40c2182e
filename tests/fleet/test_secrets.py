"""Ray's token, and the secret of digests."""

from __future__ import annotations

from pathlib import Path

import pytest

from optkit.fleet.secrets import auth_token, digest_secret
from optkit.runtime.kv.digests import SECRET_BYTES


def test_the_token_comes_from_where_ray_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("in-a-file\n")
    assert auth_token({"RAY_AUTH_TOKEN": "in-the-environment"}) == "in-the-environment"
    assert auth_token({"RAY_AUTH_TOKEN_PATH": str(file)}) == "in-a-file"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert auth_token({}) is None


def test_the_secret_of_digests_is_that_of_the_fleet_and_its_token() -> None:
    token = {"RAY_AUTH_TOKEN": "a"}
    assert digest_secret("fleet", token) == digest_secret("fleet", dict(token))
    assert (
        len({digest_secret("fleet", token), digest_secret("other", token), digest_secret("fleet", {})}) == 3
    )
    assert len(digest_secret("fleet", token)) == SECRET_BYTES
