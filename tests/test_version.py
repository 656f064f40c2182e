"""The version of optkit: a normalized release number, stated once."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.version import Version

import optkit
from optkit.version import VERSION

ROOT = Path(__file__).resolve().parents[1]


def test_version_is_a_normalized_release_number() -> None:
    assert str(Version(VERSION)) == VERSION
    assert optkit.__version__ == VERSION


def test_version_of_the_wheel_is_read_from_the_module() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert "version" in config["project"]["dynamic"]
    assert config["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "optkit.version.VERSION"}
