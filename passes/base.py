"""What a pass is: it finds sites (``check``) and rewrites them (``apply``); the driver does the rest.

``check`` is pure and says for each place it looked at whether it will change it, or why not. ``apply`` rewrites
the graph it was checked on, in place: the driver hands it a clone. A pass neither measures nor decides.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from optkit.calibration.samples import Calibration
    from optkit.graph.ir import Graph
    from optkit.machine.target import Target


class Config(BaseModel):
    """Options of a pass: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Stage(enum.IntEnum):
    """Where in a recipe a pass belongs; a recipe out of this order is refused."""

    FUSE = 1
    SMOOTH = 2
    QUANTIZE = 3
    ATTENTION = 4
    COMPILE = 5


@dataclass(frozen=True)
class Site:
    """A place the pass will change: a readable name and the nodes it needs."""

    name: str
    nodes: tuple[Any, ...]


@dataclass(frozen=True)
class Skip:
    """A place the pass looked at and leaves alone, with the reason."""

    site: str
    reason: str


@dataclass
class Plan:
    """The result of ``check``."""

    sites: list[Site] = field(default_factory=list)
    skips: list[Skip] = field(default_factory=list)


@dataclass(frozen=True)
class PassResult:
    """The result of ``apply``: how many sites changed, and numbers worth recording."""

    changed: int
    stats: dict[str, Any] = field(default_factory=dict)


class Progress(Protocol):
    """Says what is going on; ``part`` is how much of it is done, (done, total)."""

    def __call__(self, text: str, /, *, part: tuple[int, int] | None = None) -> None: ...


def no_progress(text: str, /, *, part: tuple[int, int] | None = None) -> None:
    """A ``Progress`` that does not."""


@dataclass(frozen=True)
class PassContext:
    """What a pass may look at besides the graph.

    Attributes:
        calibration: gives samples of token ids for a pass's ``calibration`` option.
        workspace: a private directory for what is finished of this very pass on this very graph; None keeps nothing.
        progress: says what is going on; ``part`` is (done, total).
    """

    target: Target
    calibration: Callable[[Calibration], list[list[int]]] | None = None
    workspace: Path | None = None
    progress: Progress = no_progress

    def calibration_windows(self, config: Calibration) -> list[list[int]]:
        """Calibration text; a pass that needs it and has none is a mistake of the caller."""
        if self.calibration is None:
            raise ValueError("this pass needs calibration text, and the context has none")
        return self.calibration(config)


class Pass(ABC):
    """One optimization. ``name`` is its row in the table and its key in recipes.

    ``exact`` passes change no value beyond float rounding: the driver holds them to a tight numeric bound
    even where the recipe names none.
    """

    name: ClassVar[str]
    stage: ClassVar[Stage]
    exact: ClassVar[bool] = True
    Config: ClassVar[type[Config]] = Config

    def __init__(self, config: Any = None) -> None:
        self.config: Any = config if config is not None else self.Config()

    @abstractmethod
    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        """Sites the pass will change and those it skips, with reasons. Does not touch the graph."""

    @abstractmethod
    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        """Rewrite the sites of ``plan``, which ``check`` made for this very graph."""
