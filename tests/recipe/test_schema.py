"""The recipe schema: values, files, round trips, and user errors for any change of a recipe."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from optkit.errors import UserError
from optkit.recipe.load import load_recipe, parse_recipe
from optkit.recipe.schema import Accept, PassEntry, Recipe
from tests.support.demo_recipe import TEXT, message

# -- reading ----------------------------------------------------------------------------------------


def test_parse_recipe_reads_every_value() -> None:
    recipe = parse_recipe(TEXT)
    assert recipe.workload.prompt_tokens == (128, 512)
    assert recipe.slo.ttft_ms == 700
    assert recipe.slo.tpot_ms is None
    assert recipe.runtime.kv_cache_bytes == 256 * 1024**2
    assert recipe.passes == (
        PassEntry(name="fuse_qkv"),
        PassEntry(name="int8", accept=Accept(max_kld=0.01), config={"lm_head": True}),
    )
    assert recipe.accept.min_top1 == 0.97


@pytest.mark.parametrize(
    ("size", "expected"), [("1KiB", 1024), ("2 MB", 2_000_000), ("3GiB", 3 * 1024**3), ("77", 77), (77, 77)]
)
def test_parse_bytes_reads_units_of_1000_and_1024(size: object, expected: int) -> None:
    recipe = parse_recipe(TEXT.replace("256MiB", str(size)))
    assert recipe.runtime.kv_cache_bytes == expected


@pytest.mark.parametrize(
    ("serving", "what", "line"),
    [
        ("rolling_window: 64\n  specprefill: true", "a rolling window reads prompts whole", 3),
        ("rolling_window: 64\n  sink_tokens: 33", "33 tokens are more than a block", 3),
    ],
)
def test_choices_that_the_server_would_refuse_are_errors(
    serving: str, what: str, line: int, tmp_path: Path
) -> None:
    file, text = tmp_path / "mine.yaml", TEXT + f"serving:\n  {serving}\n"
    file.write_text(text)
    with pytest.raises(UserError, match=what) as error:
        load_recipe(str(file))
    assert error.value.where.endswith(f":{TEXT.count(chr(10)) + line}")
    assert load_recipe(str(file), ["serving.rolling_window=0"]).serving.rolling_window == 0
    assert parse_recipe(text).serving.rolling_window == 64  # as the recipe of an artifact


def test_parse_recipe_keeps_the_order_of_passes() -> None:
    swapped = TEXT.replace("  fuse_qkv: {}\n", "").replace("accept: {min", "  fuse_qkv: {}\naccept: {min")
    assert [entry.name for entry in parse_recipe(swapped).passes] == ["int8", "fuse_qkv"]


def test_recipe_raises_when_a_field_is_set() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse_recipe(TEXT).name = "other"  # type: ignore[misc]


def test_load_recipe_names_the_nearest_recipe_when_the_name_is_unknown() -> None:
    with pytest.raises(UserError, match="did you mean 'ttft-cpu'"):
        load_recipe("ttft-cp")


@pytest.mark.parametrize("name", ["", "x" * 5000, "a\0b", "/", "../nowhere.yaml"])
def test_load_recipe_raises_a_user_error_when_the_name_is_no_recipe(name: str) -> None:
    with pytest.raises(UserError, match="no such recipe"):
        load_recipe(name)


def test_load_recipe_refuses_a_file_that_is_not_utf8(tmp_path: Any) -> None:
    (tmp_path / "r.yaml").write_bytes(b"\xff\xfe\x00name")
    with pytest.raises(UserError, match="UTF-8"):
        load_recipe(str(tmp_path / "r.yaml"))


def test_alternatives_are_read_in_order_and_their_passes_are_entries_of_the_recipe() -> None:
    text = """
schema_version: 1
name: r
passes:
  fuse_qkv: {}
  layers: {one_of: [{smoothquant: {}, int8: {group_size: 64, accept: {max_kld: 0.1}}}, {w4a8: }]}
"""
    recipe = parse_recipe(text)
    int8 = PassEntry(name="int8", accept=Accept(max_kld=0.1), config={"group_size": 64})
    first, second = (PassEntry(name="smoothquant"), int8), (PassEntry(name="w4a8"),)
    assert recipe.passes[1] == PassEntry(name="layers", one_of=(first, second))
    assert [entry.name for entry in recipe.entries] == ["fuse_qkv", "smoothquant", "int8", "w4a8"]


@pytest.mark.parametrize(
    ("alternatives", "part"),
    [
        ("{one_of: []}", "at least 1 item"),
        ("{one_of: [{}]}", "passes.layers.one_of.0"),
        ("{one_of: 3}", "passes.layers.one_of"),
        ("{one_of: [{int8: {keep: always}}]}", "can't have 'keep'"),
        ("{one_of: [3]}", "passes.layers.one_of.0"),
        ("{one_of: [{int8: {}}], accept: {max_kld: 1.0}}", "no other key"),
        ("{one_of: [{int8: {}}], group_size: 32}", "no other key"),
        ("{one_of: [{a: {one_of: [{int8: {}}]}}]}", "alternatives of its own"),
        ("{one_of: [{int8: {accept: {max_klt: 1}}}]}", "'passes.layers.one_of.0.int8.accept.max_klt'"),
    ],
)
def test_bad_alternatives_are_refused_with_the_place(alternatives: str, part: str) -> None:
    text = f"schema_version: 1\nname: r\npasses:\n  layers: {alternatives}\n"
    with pytest.raises(UserError) as error:
        parse_recipe(text, "r.yaml")
    assert part in str(error.value) and "r.yaml:4" in str(error.value)


# -- properties -------------------------------------------------------------------------------------

words = st.text(max_size=12)
keys = words.filter(lambda word: word.isprintable() and word)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | words
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3)
)
counts = st.integers(1, 4096)
accepts = st.builds(
    Accept, max_kld=st.none() | st.floats(0, 10), max_memory_bytes=st.none() | st.integers(1, 1 << 40)
)
options = keys.filter(lambda key: key not in ("accept", "keep", "one_of"))
single = st.builds(PassEntry, name=keys, accept=accepts, config=st.dictionaries(options, values, max_size=3))
candidate = st.lists(single, min_size=1, max_size=3, unique_by=lambda entry: entry.name)
alternatives = st.builds(PassEntry, name=keys, one_of=st.lists(candidate.map(tuple), min_size=1, max_size=3))
entries = single | alternatives
recipes = st.builds(
    Recipe,
    schema_version=st.just(1),
    name=st.from_regex(r"[a-z0-9][a-z0-9._-]{0,20}", fullmatch=True),
    description=st.text(max_size=60),
    workload=st.fixed_dictionaries(
        {"prompt_tokens": st.lists(counts, min_size=1, max_size=4), "batch": counts}
    ),
    slo=st.fixed_dictionaries({"ttft_ms": st.none() | st.floats(0.001, 1e9)}),
    runtime=st.fixed_dictionaries({"kv_cache_bytes": st.integers(1, 1 << 49)}),
    passes=st.lists(entries, max_size=4, unique_by=lambda entry: entry.name),
    accept=accepts,
)


@settings(deadline=None)
@given(recipes)
def test_to_yaml_is_read_back_to_an_equal_recipe(recipe: Recipe) -> None:
    again = parse_recipe(recipe.to_yaml())
    assert again == recipe
    assert again.to_yaml() == recipe.to_yaml()


def schema_paths(data: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Paths of the keys that the schema itself knows (not pass names, not their options)."""
    paths = []
    for key, value in data.items():
        if prefix[:1] != ("passes",) or "accept" in prefix:
            paths.append((*prefix, key))
        if isinstance(value, dict):
            paths += schema_paths(value, (*prefix, key))
    return paths


PATHS = schema_paths(yaml.safe_load(TEXT))


@settings(deadline=None)
@given(st.sampled_from(PATHS), st.text(min_size=1, max_size=8), st.booleans())
def test_parse_recipe_raises_a_user_error_when_a_key_is_changed(
    path: tuple[str, ...], extra: str, before: bool
) -> None:
    data = copy.deepcopy(yaml.safe_load(TEXT))
    section = data
    for key in path[:-1]:
        section = section[key]
    wrong = extra + path[-1] if before else path[-1] + extra
    section[wrong] = section.pop(path[-1])
    assert "key" in message(yaml.safe_dump(data))


@settings(deadline=None)
@given(st.integers(0, len(TEXT)), st.integers(0, 6), st.text(max_size=6))
def test_parse_recipe_raises_only_user_errors_when_the_file_is_changed(
    start: int, length: int, replacement: str
) -> None:
    text = TEXT[:start] + replacement + TEXT[start + length :]
    try:
        assert isinstance(parse_recipe(text), Recipe)
    except UserError as error:
        assert error.what
