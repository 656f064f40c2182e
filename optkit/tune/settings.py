"""Settings: a recipe with changed serve options, and the grid of settings to simulate.

Options are those of ``optkit.recipe.engine_options``, under the same names. A setting lists only changed options, so an
empty list is the recipe unchanged, and the number of options is the distance from the recipe.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optkit.bench.slo import Slo
from optkit.recipe.engine_options import flag, recipe_values
from optkit.recipe.schema import Recipe

PLACES = (1, 2, 4, 8, 16, 32, 64)
STEP_TOKENS = (128, 256, 512, 1024, 2048)
KV_FACTORS = (2, 4)
POLICY = ("scheduling_policy", "ttft_slo_ms", "tpot_slo_ms")  # options that move together
SPECULATION = "speculative_model"
GROUPS = (("max_num_seqs",), ("max_num_batched_tokens",), POLICY, ("kv_cache_bytes",), (SPECULATION,))


@dataclass(frozen=True)
class Setting:
    """A recipe by name, and changed options, in order of the names."""

    recipe: str
    options: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def of(recipe: str, options: Mapping[str, Any]) -> Setting:
        return Setting(recipe, tuple(sorted(options.items())))

    @property
    def key(self) -> str:
        return " ".join([self.recipe, *(f"{name}={value}" for name, value in self.options)])

    @property
    def knobs(self) -> list[tuple[str, ...]]:
        """The groups with changed options."""
        named = dict(self.options)
        return [group for group in GROUPS if any(name in named for name in group)]

    def without(self, group: Sequence[str]) -> Setting:
        """The setting with the options of ``group`` as in the recipe."""
        return Setting(self.recipe, tuple((n, v) for n, v in self.options if n not in group))

    def flags(self) -> list[str]:
        """The options as flags of ``optkit serve``."""
        return [word for name, value in self.options for word in (flag(name), str(value))]

    def to_dict(self) -> dict[str, Any]:
        return {"recipe": self.recipe, "options": dict(self.options)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Setting:
        return Setting.of(data["recipe"], data["options"])


def grid(name: str, recipe: Recipe, slo: Slo) -> list[Setting]:
    """The settings of ``recipe`` to simulate, settings with few changes first.

    Args:
        name: of the recipe in settings.
        slo: the objective, with the bounds for the policy ``slo``.
    """
    known = recipe_values(recipe)
    choices: list[list[dict[str, Any]]] = [
        [{"max_num_seqs": value} for value in PLACES],
        [{"max_num_batched_tokens": value} for value in STEP_TOKENS],
        list(policies(known, slo)),
        [{"kv_cache_bytes": known["kv_cache_bytes"] * factor} for factor in KV_FACTORS],
    ]
    found: dict[Setting, None] = {}
    for picked in itertools.product(*([{}, *options] for options in choices)):
        merged = {key: value for part in picked for key, value in part.items() if known.get(key) != value}
        places = merged.get("max_num_seqs", known["max_num_seqs"])
        if places <= merged.get("max_num_batched_tokens", known["max_num_batched_tokens"]):
            found[Setting.of(name, merged)] = None
    return sorted(found, key=lambda setting: len(setting.knobs))


def policies(known: Mapping[str, Any], slo: Slo) -> Iterator[dict[str, Any]]:
    """The other policy, and the policy ``slo`` with the bounds of ``slo`` and with half the bounds."""
    if known["scheduling_policy"] != "fcfs":
        yield {"scheduling_policy": "fcfs"}
    bounds = {
        f"{term.metric}_slo_ms": term.value
        for term in slo.terms
        if term.metric in ("ttft", "tpot") and term.is_upper
    }
    if not bounds:
        return
    for share in (1.0, 0.5):
        yield {"scheduling_policy": "slo"} | {name: value * share for name, value in bounds.items()}


def speculating(setting: Setting) -> Setting:
    """``setting`` with n-gram speculation, which is raced without a simulation: acceptance depends on the text."""
    return Setting.of(setting.recipe, {**dict(setting.options), SPECULATION: "ngram"})


def gains_by_guesses(slo: Slo) -> bool:
    """True if a term depends on the time of decodes."""
    return any(term.metric != "ttft" for term in slo.terms)


def overrides(setting: Setting) -> dict[str, Any]:
    """The options as overrides of the recipe, by the recipe's keys."""
    from optkit.recipe.engine_options import fact

    return {fact(name, "recipe"): value for name, value in setting.options}
