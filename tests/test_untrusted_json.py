"""JSON from other people: read with a bound, without duplicate keys, lone surrogates or deep nesting."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optkit.errors import UserError
from optkit.untrusted_json import (
    AGAIN,
    MAX_DEPTH,
    Name,
    Schema,
    Size,
    check,
    parse_bounded,
    parse_json,
    read_bounded,
)


class Entry(Schema):
    name: Name
    bytes: Size


def test_read_bounded_refuses_a_file_beyond_the_limit(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_bounded(tmp_path / "a", 5) == b"12345"
    with pytest.raises(UserError, match="larger than 4 bytes"):
        read_bounded(tmp_path / "a", 4)


@pytest.mark.parametrize("name", ["missing", "."])
def test_read_bounded_raises_a_user_error_when_there_is_no_plain_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="can't be read"):
        read_bounded(tmp_path / name, 10)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"3", b'{"a": 1, "a": 2}', b"\xff", b"[" * 100_000])
def test_parse_json_refuses_anything_but_an_object_with_unique_keys(text: bytes) -> None:
    with pytest.raises(UserError, match=r"not valid JSON|not a JSON object") as error:
        parse_json(text, "file")
    assert error.value.fix == AGAIN


def nested(depth: int) -> bytes:
    """An object with ``depth`` levels of lists."""
    return b'{"a": ' + b"[" * depth + b"]" * depth + b"}"


def test_parse_bounded_refuses_nesting_beyond_the_limit() -> None:
    assert parse_bounded(nested(MAX_DEPTH - 1), "file")
    with pytest.raises(UserError, match=f"nested more than {MAX_DEPTH} deep"):
        parse_bounded(nested(MAX_DEPTH), "file")


@pytest.mark.parametrize("data", [{"a": "\ud800"}, {"\udfff": 1}, {"a": [{"b": "x\ud800"}]}])
def test_parse_bounded_refuses_lone_surrogates(data: object) -> None:
    with pytest.raises(UserError, match="lone surrogate"):
        parse_bounded(json.dumps(data).encode(), "file")


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({"name": "a"}, "bytes"),
        ({"name": "a", "bytes": "1"}, "bytes"),
        ({"name": "a", "bytes": -1}, "bytes"),
        ({"name": "a\n", "bytes": 1}, "name"),
        ({"name": "a", "bytes": 1, "more": 1}, "more"),
    ],
)
def test_check_names_the_path_of_the_first_mismatch(data: object, path: str) -> None:
    with pytest.raises(UserError, match=rf"the file is damaged \({path}: "):
        check(Entry, data, "file")


def test_check_gives_an_instance_when_the_data_fits() -> None:
    assert check(Entry, {"name": "a", "bytes": 1}, "file") == Entry(name="a", bytes=1)
