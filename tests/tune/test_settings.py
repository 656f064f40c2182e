"""Settings and the grid: every option fits the recipe, the recipe itself comes first, and text forms read back."""

from __future__ import annotations

import pytest

from optkit.bench.slo import parse_slo
from optkit.recipe.engine_options import engine_options
from optkit.recipe.load import load_recipe, overridden
from optkit.tune.settings import POLICY, Setting, gains_by_guesses, grid, overrides, speculating

SLO = parse_slo("ttft_p95<700ms,tpot<50ms@4rps")


@pytest.mark.parametrize("name", ["baseline", "ttft-cpu", "throughput-cpu", "edge-cpu"])
def test_the_grid_of_a_recipe_has_valid_options_and_begins_with_the_recipe(name: str) -> None:
    recipe = load_recipe(name)
    found = grid(name, recipe, SLO)
    assert found[0] == Setting(name) and len(set(found)) == len(found) > 100
    assert [len(s.knobs) for s in found] == sorted(len(s.knobs) for s in found)
    plain = engine_options(recipe)
    for setting in found:
        options = engine_options(recipe, dict(setting.options))
        assert options.max_num_seqs <= options.max_num_batched_tokens
        assert all(getattr(plain, key) != value for key, value in setting.options)
        changed = overridden(recipe, overrides(setting))
        assert engine_options(changed) == options


def test_the_policy_gets_the_bounds_of_the_objective() -> None:
    recipe = load_recipe("baseline")
    found = {dict(s.options).get("ttft_slo_ms") for s in grid("baseline", recipe, SLO)}
    assert found == {None, 700.0, 350.0}
    only = grid("baseline", recipe, parse_slo("throughput>5"))
    assert all("scheduling_policy" not in dict(s.options) for s in only)


def test_options_of_a_policy_move_together() -> None:
    setting = Setting.of("r", {"scheduling_policy": "slo", "ttft_slo_ms": 7.0, "max_num_seqs": 4})
    assert setting.knobs == [("max_num_seqs",), POLICY]
    assert setting.without(POLICY) == Setting.of("r", {"max_num_seqs": 4})
    assert Setting.from_dict(setting.to_dict()) == setting
    assert setting.key == "r max_num_seqs=4 scheduling_policy=slo ttft_slo_ms=7.0"
    assert setting.flags()[:2] == ["--max-num-seqs", "4"]


def test_speculation_is_for_objectives_with_decodes() -> None:
    assert gains_by_guesses(SLO) and not gains_by_guesses(parse_slo("ttft<7"))
    assert speculating(Setting("r")).flags() == ["--speculative-model", "ngram"]
