"""Options of the engine: each stated once, and a misspelt or wrong one is an error wherever it is read."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from optkit.cli import serve
from optkit.errors import UserError
from optkit.recipe import engine_options as options_module
from optkit.recipe import schema
from optkit.recipe.engine_options import (
    DEFAULTS,
    NAMES,
    EngineOptions,
    SchedulingOptions,
    bounds,
    engine_options,
    fact,
    facts,
    value_type,
)
from optkit.recipe.load import load_recipe
from optkit.runtime.scheduling.config import SchedulerConfig

ROOT = Path(__file__).resolve().parents[2] / "optkit"
SOURCES = [
    path for name in ("cli", "recipe", "runtime", "serve") for path in sorted((ROOT / name).rglob("*.py"))
]
SHARES = ("gpu_memory_utilization", "pinned_cache_share", "specprefill_keep_pct")
IN_RECIPES = [name for name in NAMES if fact(name, "recipe")]


def stated(path: Path) -> set[tuple[str, str]]:
    """(class, option) for each option that a class of ``path`` declares with a literal default or without one."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        for item in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                taken = path.name == "schema.py" and "DEFAULT" in ast.unparse(item.value or item)
                if item.target.id in NAMES and not taken:
                    found.add((node.name, item.target.id))
    return found


# Values that come out of an option, facts of a model or a runner, and choices of a request under the same name.
EFFECTIVE = {
    ("SchedulerConfig", "max_model_len"),
    ("EngineInfo", "gpu_memory_utilization"),
    ("Model", "max_model_len"),
    ("Runner", "block_size"),
    ("Embedder", "block_size"),
    ("_Meta", "max_model_len"),
    ("EngineReport", "block_size"),
    ("BlockStored", "block_size"),
    ("EngineRequest", "specprefill"),
    ("GenerationRequest", "specprefill"),
    ("GenerationRequest", "specprefill_keep_pct"),
    ("Rolling", "block_size"),
    ("GenerationRequest", "rolling_window"),  # a request's own choice
    ("GenerationRequest", "sink_tokens"),
}


def test_each_option_is_declared_by_one_class() -> None:
    found = [place for path in SOURCES for place in stated(path)]
    assert set(found) >= EFFECTIVE
    found = [place for place in found if place not in EFFECTIVE]
    assert sorted(name for _, name in found) == sorted(NAMES), found
    assert {owner for owner, _ in found} == {"EngineOptions", "SchedulingOptions"}


@pytest.mark.parametrize("name", NAMES)
def test_an_option_has_a_help_text_a_group_and_a_unit_where_it_counts_something(name: str) -> None:
    assert facts(name).description and fact(name, "group")
    counts = value_type(name) in (int, float) and name not in SHARES
    assert bool(fact(name, "unit")) == counts
    for suffix, unit in (("_ms", "milliseconds"), ("_bytes", "bytes"), ("_timeout", "seconds")):
        assert name.endswith(suffix) == (fact(name, "unit") == unit)


def test_the_flags_of_serve_are_the_options_that_have_one() -> None:
    own = {"artifacts", "memory_budget", "idle_timeout", "load_timeout"}
    own |= {"host", "port", "served_model_name", "api_key_file", "max_queue"}
    own |= {"request_timeout", "log_format", "otlp_traces_endpoint", "shutdown_timeout", "chat_template"}
    own |= {"allowed_origins", "root_path", "ssl_certfile", "ssl_keyfile", "generation_config"}
    own |= {"tool_call_parser", "reasoning_parser", "response_cache", "demo", "profile_dir"}
    own |= {"replicas", "prefill"}
    parameters = inspect.signature(serve.serve).parameters
    assert set(parameters) - own == {name for name in NAMES if fact(name, "flag")}
    text = Path(inspect.getsourcefile(serve) or "").read_text()
    assert not [name for name in NAMES if f"    {name}:" in text]


@pytest.mark.parametrize("name", IN_RECIPES)
def test_a_recipe_has_the_default_and_the_bounds_of_the_option(name: str) -> None:
    section, key = fact(name, "recipe").split(".")
    model = {"runtime": schema.Runtime, "slo": schema.Slo, "serving": schema.Serving}[section]
    assert getattr(model(), key) == getattr(DEFAULTS, name)
    limits = bounds(name)
    assert bool(limits) == (value_type(name) in (int, float))
    for side, bad, good in (("ge", -1, 0), ("gt", 0, 1), ("le", 1, 0)):
        if side in limits:
            value = limits[side]
            assert refused_by_recipe(model, key, value + bad) and refused_by_option(name, value + bad)
            within = value + good if name != "gpu_memory_utilization" else 0.5
            assert not refused_by_recipe(model, key, within) and not refused_by_option(name, within)


def refused_by_recipe(model: Any, key: str, value: Any) -> bool:
    try:
        model.model_validate({key: value})
    except ValidationError:
        return True
    return False


def refused_by_option(name: str, value: Any) -> bool:
    try:
        engine_options(None, {name: value})
    except UserError:
        return True
    return False


def test_the_sections_of_a_recipe_have_no_option_that_is_not_the_engine_s() -> None:
    keys = {fact(name, "recipe") for name in IN_RECIPES}
    found = {f"runtime.{key}" for key in schema.Runtime.model_fields}
    found |= {f"slo.{key}" for key in schema.Slo.model_fields}
    found |= {f"serving.{key}" for key in schema.Serving.model_fields}
    assert found - keys == {"runtime.compute_dtype"}  # decides how the graph is lowered
    assert keys <= found


def test_a_given_option_wins_over_the_recipe_and_the_recipe_over_the_default() -> None:
    recipe = load_recipe("ttft-cpu", ["runtime.max_num_seqs=3", "slo.tpot_ms=40", "runtime.block_size=8"])
    found = engine_options(recipe, {"max_num_seqs": 5, "tpot_slo_ms": None, "queue_timeout": 2.5})
    assert (found.max_num_seqs, found.tpot_slo_ms, found.block_size, found.queue_timeout) == (5, 40, 8, 2.5)
    assert found.num_speculative_tokens == DEFAULTS.num_speculative_tokens


def test_a_recipe_sets_how_it_is_served_and_a_given_option_turns_it_off() -> None:
    recipe = load_recipe(
        "ttft-cpu",
        ["serving.speculative_model=ngram", "serving.kv_offload_bytes=1MiB", "serving.threads=3"],
    )
    found = engine_options(recipe)
    assert (found.speculative_model, found.kv_offload_bytes, found.threads) == ("ngram", 1 << 20, 3)
    off = engine_options(recipe, {"speculative_model": "none", "kv_offload_bytes": 0, "threads": 0})
    assert (off.speculative_model, off.kv_offload_bytes, off.threads) == ("none", 0, 0)


@pytest.mark.parametrize(
    "override",
    ["serving.speculative_model=draft/", "serving.kv_offload_dir=/tmp", "serving.trust_artifact_code=true"],
)
def test_a_recipe_names_no_path_and_trusts_no_code(override: str) -> None:
    with pytest.raises(UserError):
        load_recipe("ttft-cpu", [override])


def test_on_a_gpu_the_kv_cache_is_what_is_left_unless_its_size_is_given() -> None:
    recipe = load_recipe("ttft-h100")
    assert recipe.target != "cpu"
    assert engine_options(recipe).kv_cache_bytes is None
    assert engine_options(recipe, {"kv_cache_bytes": 1 << 20}).kv_cache_bytes == 1 << 20


def test_a_misspelt_option_is_an_error_with_the_nearest_name_where_it_is_given() -> None:
    with pytest.raises(UserError, match=r"unknown option 'max_num_seq'.*'max_num_seqs'"):
        engine_options(None, {"max_num_seq": 4})


@pytest.mark.parametrize(
    ("name", "value"), [("max_num_seqs", "4"), ("max_num_seqs", 0), ("scheduling_policy", "lifo")]
)
def test_a_wrong_value_is_an_error_that_names_the_flag(name: str, value: Any) -> None:
    with pytest.raises(UserError) as error:
        engine_options(None, {name: value})
    assert error.value.where == "--" + name.replace("_", "-")


@pytest.mark.parametrize("bad", [{"max_num_seq": 4}, {"max_num_seqs": 0}, {"max_num_seqs": "4"}])
def test_decoding_refuses_an_unknown_or_wrong_option(bad: dict[str, Any]) -> None:
    """The receiving side of the process border."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(bad), type=EngineOptions)


def test_options_survive_the_border() -> None:
    there = msgspec.msgpack.encode(engine_options(load_recipe("ttft-cpu"), {"kv_offload_dir": "/tmp"}))
    assert msgspec.msgpack.decode(there, type=EngineOptions).kv_offload_dir == "/tmp"


def test_the_scheduler_s_config_has_each_option_of_the_scheduler() -> None:
    assert set(SchedulingOptions.__struct_fields__) < set(SchedulerConfig.__struct_fields__)
    config = SchedulerConfig(**DEFAULTS.scheduling(), max_model_len=64, num_blocks=8)
    assert all(
        getattr(config, name) == getattr(DEFAULTS, name) for name in SchedulingOptions.__struct_fields__
    )


def test_groups_are_those_of_the_help() -> None:
    groups = {options_module.LOADING, options_module.SCHEDULING, options_module.ACCESS}
    assert {fact(name, "group") for name in NAMES} == groups
