"""The interface of passes: ``check`` finds sites and ``apply`` rewrites the sites; the driver does the rest.

``check`` is pure and gives each place a change or a reason against the change. ``apply`` rewrites the
checked graph, a clone, in place. A pass neither measures nor decides. docs/passes.md has the rules.
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
    """The place of a pass in a recipe; a recipe in another order is refused.

    A pass may have several places: from ``Pass.stage`` to ``Pass.last_stage``.

    Attributes:
        FUSE: rewrites ops or chooses kernels, with equal logits up to rounding.
        TRANSFORM: changes or removes float weights.
        QUANTIZE: stores weights in fewer bits.
        KERNELS: chooses the type of the KV cache, and the kernels that read the type.
        COMPILE: generates code, or KV, for the finished graph.
    """

    FUSE = 1
    TRANSFORM = 2
    QUANTIZE = 3
    KERNELS = 4
    COMPILE = 5


@dataclass(frozen=True)
class Site:
    """A place to change: a readable name and the nodes for the change."""

    name: str
    nodes: tuple[Any, ...]


@dataclass(frozen=True)
class Skip:
    """A place without a change, with the reason."""

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
    """A progress callback; ``part`` is (done, total)."""

    def __call__(self, text: str, /, *, part: tuple[int, int] | None = None) -> None: ...


def no_progress(text: str, /, *, part: tuple[int, int] | None = None) -> None:
    """A ``Progress`` without output."""


@dataclass(frozen=True)
class PassContext:
    """The surroundings of a pass besides the graph.

    Attributes:
        calibration: gives samples of token ids for a pass's ``calibration`` option.
        workspace: a private directory for finished parts of the pass on the graph; None keeps nothing.
        progress: the progress callback.
        source: the graph of the source model, as captured, for passes that compare with it.
    """

    target: Target
    calibration: Callable[[Calibration], list[list[int]]] | None = None
    workspace: Path | None = None
    progress: Progress = no_progress
    source: Graph | None = None

    def calibration_windows(self, config: Calibration) -> list[list[int]]:
        """Calibration text.

        Raises:
            ValueError: the context has no text.
        """
        if self.calibration is None:
            raise ValueError("this pass needs calibration text, and the context has none")
        return self.calibration(config)


class Pass(ABC):
    """An optimization. ``name`` is the row in the table of passes and the key in recipes.

    ``exact`` passes change no value beyond float rounding: the driver applies a tight numeric bound, also in a
    recipe without bounds. A pass that is not ``measured`` leaves the graph as it is.
    """

    name: ClassVar[str]
    stage: ClassVar[Stage]
    last_stage: ClassVar[Stage | None] = None  # None: ``stage``, the only place
    exact: ClassVar[bool] = True
    measured: ClassVar[bool] = True
    Config: ClassVar[type[Config]] = Config

    def __init__(self, config: Any = None) -> None:
        self.config: Any = config if config is not None else self.Config()

    @abstractmethod
    def check(self, graph: Graph, ctx: PassContext) -> Plan:
        """Find the sites to change, and the places to skip with reasons; ``graph`` is not changed."""

    @abstractmethod
    def apply(self, graph: Graph, plan: Plan, ctx: PassContext) -> PassResult:
        """Rewrite the sites of ``plan``, made by ``check`` for the same graph."""
