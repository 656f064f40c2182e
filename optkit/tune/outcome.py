"""The end of a search: the setting, the confirmation, the effects of the options, and advice where nothing holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from optkit.tune.intervals import Ratio
from optkit.tune.settings import Setting


@dataclass
class Outcome:
    """The end of a search.

    Attributes:
        held: the objective is shown by the confirmation.
        setting: the confirmed setting, else the best; None where no candidate could be served.
        default: the setting for comparisons.
        claim: values of the worst order of the confirmation.
        orders: the trials of the confirmation, by order.
        effects: of each changed knob against the recipe's value, measured.
        against_default: cost of ``setting`` over the default's, measured; None for the default.
        reasons: the reasons for "not shown".
        advice: the part that binds and the single change of most help, for an objective without success.
        quality: lines on the recipe of ``setting`` against the source model, with intervals and bounds.
        simulated: values of ``setting`` in the simulation; empty where not simulated.
        notes: ends of phases by the budget, and settings without a trial.
    """

    held: bool = False
    setting: Setting | None = None
    default: Setting | None = None
    claim: str = ""
    orders: list[dict[str, Any]] = field(default_factory=list)
    effects: dict[str, Ratio] = field(default_factory=dict)
    against_default: Ratio | None = None
    reasons: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    quality: list[str] = field(default_factory=list)
    simulated: str = ""
    notes: list[str] = field(default_factory=list)
