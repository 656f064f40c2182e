"""Addresses, ports and API keys of a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from optkit.errors import UserError
from optkit.serve.http.address import bind, is_loopback, read_api_keys


def test_foreign_address_is_a_user_error() -> None:
    with pytest.raises(UserError, match="cannot listen"):
        bind("203.0.113.7", 0)
    with pytest.raises(UserError):
        bind("no.such.host.invalid", 0)


def test_loopback_names() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"))


def test_api_key_sources(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from-file\n")
    assert read_api_keys(None, {}) == ()
    assert read_api_keys(None, {"OPTKIT_API_KEY": "from-env"}) == ("from-env",)
    assert read_api_keys(file, {"OPTKIT_API_KEY": "from-env"}) == ("from-file",)
    file.write_text("# whose key this is\none\n\n two \n")
    assert read_api_keys(file, {}) == ("one", "two")
    for bad in ("", "# nothing", "two words", "ключ", "\n".join(map(str, range(257)))):
        file.write_text(bad)
        with pytest.raises(UserError):
            read_api_keys(file, {})
    for missing in ({"OPTKIT_API_KEY": ""}, {"OPTKIT_API_KEY": "a b"}):
        with pytest.raises(UserError):
            read_api_keys(None, missing)
    with pytest.raises(UserError):
        read_api_keys(tmp_path / "absent", {})
