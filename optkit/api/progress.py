"""Progress of long calls, as events for a callback."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from optkit.passes.base import Progress, no_progress


@dataclass(frozen=True)
class ProgressEvent:
    """A step of a long call; ``print`` works as a callback.

    Attributes:
        text: a line, ``stage: detail`` where there is a detail.
        part: (done, total) within the stage, as of layers; None without parts.
        kind: ``warning`` for an important line.
    """

    text: str
    part: tuple[int, int] | None = None
    kind: Literal["progress", "warning"] = "progress"

    @property
    def stage(self) -> str:
        """The text before the colon."""
        return self.text.partition(": ")[0]

    @property
    def detail(self) -> str:
        """The text after the colon; empty without a colon."""
        return self.text.partition(": ")[2]

    def __str__(self) -> str:
        done = "" if self.part is None else f" ({self.part[0]} of {self.part[1]})"
        return f"{'warning: ' if self.kind == 'warning' else ''}{self.text}{done}"


ProgressCallback = Callable[[ProgressEvent], object]


def lines_to(callback: ProgressCallback | None) -> Progress:
    """The pipeline's ``Progress`` with calls of ``callback``; an exception in the callback ends the run."""
    if callback is None:
        return no_progress

    def progress(text: str, /, *, part: tuple[int, int] | None = None) -> None:
        callback(ProgressEvent(text, part))

    return progress


def warn(callback: ProgressCallback | None, text: str) -> None:
    """Give a warning to ``callback``; without a callback to Python's ``warnings``."""
    if callback is None:
        warnings.warn(text, RuntimeWarning, stacklevel=5)  # the line with the public function
    else:
        callback(ProgressEvent(text, kind="warning"))
