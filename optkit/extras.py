"""Optional packages, and the error of a command when some of the packages are missing.

The list is in pyproject.toml and is read back from the metadata of the installation. Where optkit is not installed
(run from a source tree alone) the list is unknown, and no command is refused.
"""

from __future__ import annotations

import threading
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING

from optkit.errors import UserError, refusal

if TYPE_CHECKING:
    from packaging.requirements import Requirement

EXTRAS = (
    "serve",
    "formats",
    "structured",
    "otel",
    "kv-events",
    "fleet",
)  # the extras for users; further extras are for development


def required(extra: str = "") -> list[Requirement]:
    """The requirements of the core, or the additional requirements of ``extra``, on the current platform."""
    try:
        lines = metadata.requires("optkit") or []
    except metadata.PackageNotFoundError:
        return []
    with _parsing:
        return list(_parsed(tuple(lines), extra))


# Markers are compiled, and CPython 3.11 can fail where two threads compile at once.
_parsing = threading.Lock()


@cache
def _parsed(lines: tuple[str, ...], extra: str) -> tuple[Requirement, ...]:
    from packaging.requirements import Requirement

    return tuple(found for found in map(Requirement, lines) if _is_of(found, extra))


def _is_of(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    in_core = marker is None or marker.evaluate({"extra": ""})
    if not extra:
        return in_core
    return not in_core and marker is not None and marker.evaluate({"extra": extra})


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def need_extra(extra: str, feature: str) -> None:
    """Refuse ``feature`` if packages of ``extra`` are missing.

    Raises:
        UserError: with the missing packages and the pip command.
    """
    missing = [found.name for found in required(extra) if installed_version(found.name) is None]
    if missing:
        raise UserError(
            f"{feature} needs packages that are not installed: {', '.join(missing)}",
            fix=f"pip install 'optkit[{extra}]'",
        )


def missing_package(error: ModuleNotFoundError) -> UserError | None:
    """The error for an import that failed because a package is absent; None for a module of optkit."""
    package = (error.name or "").partition(".")[0]
    if not package or package == "optkit":
        return None
    return UserError(f"the package '{package}' is not installed", fix=f"pip install {package}")


def explained(error: Exception) -> UserError | None:
    """The user error for a missing package or a refusal by the operating system; None for any other error."""
    return missing_package(error) if isinstance(error, ModuleNotFoundError) else refusal(error)
