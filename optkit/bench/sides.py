"""The sides of a benchmark: artifacts, models and running servers, in any combination.

=========================  ==========================================================================
a side is written          measured is
=========================  ==========================================================================
``http://host:port``       a running server; ``OPTKIT_API_KEY`` holds the API key, if any
a directory with a         ``optkit serve`` of the artifact
``optkit/manifest.json``
any other model            ``optkit serve`` of the unoptimized model, from MODEL of ``optkit optimize``
=========================  ==========================================================================

``NAME=`` before a side gives the name for tables and assertions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from optkit.bench.run import Progress, Side, artifact_side, baseline_artifact, baseline_sides
from optkit.bench.servers import API_KEY
from optkit.errors import UserError

NAMED = re.compile(r"(?P<name>[A-Za-z][\w.-]*)=(?P<side>.+)")
URL = re.compile(r"https?://", re.IGNORECASE)


@dataclass(frozen=True)
class Described:
    """A side as written: exactly one of ``url``, ``artifact`` and ``model``, and perhaps a name."""

    name: str | None = None
    url: str | None = None
    artifact: Path | None = None
    model: str | None = None

    @property
    def tokenizer(self) -> str | None:
        """A directory or a model with a tokenizer."""
        return self.model if self.artifact is None else str(self.artifact)

    def side(self, default: str, progress: Progress) -> Side:
        """The side, ready to start; an unoptimized model is built into the cache."""
        if self.url is not None:
            return Side(self.name or default, url=self.url, api_key=os.environ.get(API_KEY))
        if self.artifact is not None:
            return artifact_side(self.artifact, self.name or default)
        progress(f"preparing {self.model}")
        return artifact_side(baseline_artifact(str(self.model)), self.name or default)


def described(text: str, where: str) -> Described:
    """Parse a side.

    Raises:
        UserError: a path without a file or directory.
    """
    named = None if URL.match(text) or Path(text).exists() else NAMED.fullmatch(text)
    if named:
        return replace(described(named["side"], where), name=named["name"])
    if URL.match(text):
        return Described(url=text)
    path = Path(text)
    if (path / "optkit" / "manifest.json").is_file():
        return Described(artifact=path)
    if not path.exists() and (text.startswith((".", "/", "~")) or text.endswith("/")):
        raise UserError("no such artifact", where=text, fix="optkit optimize MODEL -o DIR makes one")
    return Described(model=text)


def first_side(artifact: str | Path | None, url: str | None) -> Described:
    """The side of the argument or of ``--url``.

    Raises:
        UserError: neither, both, or no such directory.
    """
    if (artifact is None) == (url is None):
        raise UserError(
            "needs either an artifact or --url", where="optkit bench", fix="optkit bench artifact/"
        )
    if artifact is None:
        return Described(url=url)
    if isinstance(artifact, Path):
        if not artifact.is_dir():
            raise UserError(
                "no such artifact", where=str(artifact), fix="optkit optimize MODEL -o DIR makes one"
            )
        return Described(artifact=artifact)
    return described(artifact, "optkit bench")


def choose_sides(
    first: Described, baseline: str | None, against: Sequence[str], progress: Progress
) -> list[Side]:
    """The first side, the sides of ``against``, then the sides of ``baseline``; every name is different."""
    others = [described(text, "--against") for text in against]
    found = [first.side("server" if first.url else "optkit", progress)]
    found += [side.side(default_name(side), progress) for side in others]
    found += baseline_sides(baseline, progress) if baseline else []
    return distinct(found)


def default_name(side: Described) -> str:
    """A name from the last part of a path, or from a URL's host."""
    if side.url is not None:
        return URL.sub("", side.url).split("/")[0].replace(":", "-")
    if side.artifact is not None:
        return side.artifact.resolve().name
    return Path(str(side.model)).name


def distinct(sides: Sequence[Side]) -> list[Side]:
    """The sides, with a number behind repeated names."""
    names: set[str] = set()
    found = []
    for side in sides:
        name, number = side.name, 2
        while name in names:
            name, number = f"{side.name}-{number}", number + 1
        names.add(name)
        found.append(replace(side, name=name))
    return found


def tokenizer_directory(tokenizer: str | None, sides: Sequence[Described], baseline: str | None) -> str:
    """Directory of the tokenizer: ``tokenizer``, else the first side's with any, else the baseline model's.

    Raises:
        UserError: there is none.
    """
    from optkit.checkpoint.locate import resolve

    found = tokenizer or next((side.tokenizer for side in sides if side.tokenizer), None) or baseline
    if found is None:
        raise UserError(
            "prompts need a tokenizer", where="--url", fix="add --tokenizer MODEL or --baseline MODEL"
        )
    if any(side.artifact is not None and str(side.artifact) == found for side in sides):
        return found
    return str(resolve(found).directory)
