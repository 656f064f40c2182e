"""The recipe schema: round trips, overrides, and errors that name key, file and line."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

import optkit.passes
from optkit.errors import UserError
from optkit.passes.resolve import recipe_json_schema, resolve_passes
from optkit.recipe.load import load_recipe, parse_recipe
from optkit.recipe.schema import Accept, PassEntry, Recipe

TEXT = """\
schema_version: 1
name: demo
description: a test
workload: {prompt_tokens: [128, 512], output_tokens: 64}
slo:
  ttft_ms: 700
runtime: {kv_cache_bytes: 256MiB}
passes:
  fuse_qkv: {}
  int8:
    lm_head: true
    accept: {max_kld: 1e-2}
accept: {min_top1: 0.97}
"""


class Int8Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    lm_head: bool = False
    ignore: list[str] = []
    bits: int = Field(default=8, ge=2, le=8)


class EmptyConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FakeInt8:
    stage = 2
    Config = Int8Config


class FakeFuse:
    stage = 1
    Config = EmptyConfig


@pytest.fixture
def pass_table(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = {"fuse_qkv": FakeFuse, "int8": FakeInt8}
    monkeypatch.setattr(optkit.passes, "PASSES", {name: f"fake:{name}" for name in classes}, raising=False)
    monkeypatch.setattr(optkit.passes, "load", classes.__getitem__, raising=False)


def message(text: str, *overrides: str, resolve: bool = False) -> str:
    """The one line that ``text`` is refused with."""
    with pytest.raises(UserError) as caught:
        recipe = parse_recipe(text, "r.yaml", overrides)
        if resolve:
            resolve_passes(recipe)
    line = str(caught.value)
    assert "\n" not in line
    return line


# -- reading ----------------------------------------------------------------------------------------


def test_every_value_is_read() -> None:
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
def test_sizes(size: object, expected: int) -> None:
    recipe = parse_recipe(TEXT.replace("256MiB", str(size)))
    assert recipe.runtime.kv_cache_bytes == expected


def test_order_of_passes_is_the_order_written() -> None:
    swapped = TEXT.replace("  fuse_qkv: {}\n", "").replace("accept: {min", "  fuse_qkv: {}\naccept: {min")
    assert [entry.name for entry in parse_recipe(swapped).passes] == ["int8", "fuse_qkv"]


def test_recipe_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse_recipe(TEXT).name = "other"  # type: ignore[misc]


# -- errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("description", "descripton", ["r.yaml:3", "'descripton'", "did you mean 'description'"]),
        ("ttft_ms", "ttft", ["r.yaml:6", "'slo.ttft'", "did you mean 'ttft_ms'"]),
        ("max_kld", "max_kl", ["r.yaml:12", "'passes.int8.accept.max_kl'", "did you mean 'max_kld'"]),
        ("700", "soon", ["r.yaml:6", "slo.ttft_ms", "number", "'soon'"]),
        ("700", "-1", ["r.yaml:6", "slo.ttft_ms", "greater than 0"]),
        ("700", ".nan", ["r.yaml:6", "slo.ttft_ms", "finite"]),
        ("[128, 512]", "[128, 0]", ["r.yaml:4", "workload.prompt_tokens.1", "greater than or equal to 1"]),
        ("[128, 512]", "[]", ["r.yaml:4", "workload.prompt_tokens", "at least 1"]),
        ("64}", "true}", ["r.yaml:4", "workload.output_tokens", "integer"]),
        ("256MiB", "256 potatoes", ["r.yaml:7", "runtime.kv_cache_bytes", "MiB"]),
        ("{min_top1: 0.97}", "{min_top1: 97}", ["r.yaml:13", "accept.min_top1", "less than or equal to 1"]),
        ("schema_version: 1", "schema_version: 2", ["r.yaml:1", "schema_version", "1"]),
        ("schema_version: 1\n", "", ["schema_version", "missing"]),
        ("fuse_qkv: {}", "fuse_qkv: 3", ["r.yaml:8", "fuse_qkv", "mapping"]),
        ("slo:\n  ttft_ms: 700", "slo: 7", ["r.yaml:5", "slo", "a mapping of keys to values, got 7"]),
        ("[128, 512]", "128", ["r.yaml:4", "workload.prompt_tokens", "a list, got 128"]),
        ("  fuse_qkv: {}\n  int8:\n    lm_head: true\n", "  - name: int8\n  - b:\n", ["r.yaml:", "mapping"]),
        ("slo:", "name:", ["r.yaml:5", "'name' is already set on line 2"]),
        ("a test", "!!python/object:os.system x", ["r.yaml:3", "tags are not allowed"]),
        ("a test", "&a x", ["r.yaml:3", "anchors"]),
        ("a test", "[a, b", ["r.yaml:", "YAML"]),
        ("name: demo", "1: demo", ["r.yaml:2", "plain word"]),
        ("name: demo", "name: Not A Name", ["r.yaml:2", "name", "pattern"]),
    ],
)
def test_an_error_names_the_place_and_the_remedy(old: str, new: str, parts: list[str]) -> None:
    assert old in TEXT
    line = message(TEXT.replace(old, new))
    for part in parts:
        assert part in line


def test_what_is_not_a_mapping_is_refused() -> None:
    for text in ("", "- a", "3", "null"):
        assert "mapping" in message(text)


def test_a_deep_document_is_refused() -> None:
    assert "deep" in message("a: " + "[" * 5000)


def test_a_long_document_is_refused() -> None:
    assert "longer" in message("#" * (1 << 21))


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'ttft-cpu'"):
        load_recipe("ttft-cp")


@pytest.mark.parametrize("name", ["", "x" * 5000, "a\0b", "/", "../nowhere.yaml"])
def test_what_cannot_be_a_recipe_is_a_user_error(name: str) -> None:
    with pytest.raises(UserError, match="no such recipe"):
        load_recipe(name)


def test_a_binary_file_is_refused(tmp_path: Any) -> None:
    (tmp_path / "r.yaml").write_bytes(b"\xff\xfe\x00name")
    with pytest.raises(UserError, match="UTF-8"):
        load_recipe(str(tmp_path / "r.yaml"))


# -- overrides --------------------------------------------------------------------------------------


def test_overrides_are_yaml_scalars() -> None:
    settings = [
        "passes.int8.lm_head=false",
        "runtime.max_num_seqs=4",
        "accept.max_kld=1e-3",
        "slo.ttft_ms=null",
    ]
    recipe = parse_recipe(TEXT, overrides=settings)
    assert recipe.passes[1].config == {"lm_head": False}
    assert recipe.runtime.max_num_seqs == 4
    assert recipe.accept.max_kld == 0.001
    assert recipe.slo.ttft_ms is None


def test_an_override_reaches_a_section_that_is_not_written() -> None:
    text = TEXT.replace("runtime: {kv_cache_bytes: 256MiB}\n", "").replace("fuse_qkv: {}", "fuse_qkv:")
    recipe = parse_recipe(
        text, overrides=["runtime.max_num_seqs=4", "passes.fuse_qkv.accept.min_speedup=1.0"]
    )
    assert recipe.runtime.max_num_seqs == 4
    assert recipe.passes[0].accept.min_speedup == 1


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("runtime.max_num_seq=4", ["--set runtime.max_num_seq=4", "did you mean 'max_num_seqs'"]),
        ("runtme.max_num_seqs=4", ["unknown key 'runtme'", "did you mean 'runtime'"]),
        ("runtime.max_num_seqs=many", ["--set runtime.max_num_seqs=many", "integer"]),
        ("passes.awq.bits=4", ["'awq' is not in this recipe", "fuse_qkv, int8"]),
        ("passes.int8=4", ["name the pass and its option"]),
        ("passes.int8.accept.max_kl=4", ["did you mean 'max_kld'"]),
        ("name.first=4", ["'name' has no keys below it"]),
        ("runtime.max_num_seqs", ["key.path=value"]),
        ("=4", ["key.path=value"]),
        ("slo.ttft_ms=[", ["--set slo.ttft_ms=[", "YAML"]),
    ],
)
def test_a_bad_override_names_the_argument(override: str, parts: list[str]) -> None:
    line = message(TEXT, override)
    for part in parts:
        assert part in line


# -- passes -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("pass_table")
def test_resolve_gives_each_pass_its_config() -> None:
    fuse, int8 = resolve_passes(parse_recipe(TEXT))
    assert fuse.pass_class is FakeFuse
    assert int8.config == Int8Config(lm_head=True)
    assert int8.entry.accept.max_kld == 0.01


@pytest.mark.usefixtures("pass_table")
@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("  int8:", "  int9:", ["r.yaml:10", "unknown pass 'int9'", "did you mean 'int8'"]),
        ("lm_head", "lm_hed", ["r.yaml:11", "'passes.int8.lm_hed'", "did you mean 'lm_head'"]),
        ("lm_head: true", "bits: 16", ["r.yaml:11", "passes.int8.bits", "less than or equal to 8", "16"]),
        ("accept: {min_top1", "  fuse_qkv: {}\naccept: {min_top1", ["already set on line 9"]),
        ("fuse_qkv: {}", "fuse_qkv: {x: 1}", ["r.yaml:9", "'passes.fuse_qkv.x'", "accept"]),
    ],
)
def test_resolve_checks_names_and_options(old: str, new: str, parts: list[str]) -> None:
    line = message(TEXT.replace(old, new), resolve=True)
    for part in parts:
        assert part in line


@pytest.mark.usefixtures("pass_table")
def test_passes_out_of_order_are_refused() -> None:
    text = TEXT.replace("  fuse_qkv: {}\n", "").replace("accept: {min", "  fuse_qkv: {}\naccept: {min")
    assert "r.yaml:12: 'fuse_qkv' must come before 'int8'" in message(text, resolve=True)


@pytest.mark.usefixtures("pass_table")
def test_an_overridden_option_is_blamed_on_the_override() -> None:
    assert "--set passes.int8.bits=16" in message(TEXT, "passes.int8.bits=16", resolve=True)


@pytest.mark.usefixtures("pass_table")
def test_the_schema_accepts_the_recipe_and_refuses_a_typo() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = recipe_json_schema()
    data = yaml.safe_load(TEXT.replace("1e-2", "0.01"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(data, schema)
    data["passes"]["int8"]["lm_hed"] = True
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schema)


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
entries = st.builds(
    PassEntry,
    name=keys,
    accept=accepts,
    config=st.dictionaries(keys.filter("accept".__ne__), values, max_size=3),
)
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
def test_what_is_written_is_read_back_equal(recipe: Recipe) -> None:
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
def test_a_mutated_key_is_always_a_user_error(path: tuple[str, ...], extra: str, before: bool) -> None:
    data = copy.deepcopy(yaml.safe_load(TEXT))
    section = data
    for key in path[:-1]:
        section = section[key]
    wrong = extra + path[-1] if before else path[-1] + extra
    section[wrong] = section.pop(path[-1])
    assert "key" in message(yaml.safe_dump(data))


@settings(deadline=None)
@given(st.integers(0, len(TEXT)), st.integers(0, 6), st.text(max_size=6))
def test_a_mutated_file_is_a_recipe_or_a_user_error(start: int, length: int, replacement: str) -> None:
    text = TEXT[:start] + replacement + TEXT[start + length :]
    try:
        assert isinstance(parse_recipe(text), Recipe)
    except UserError as error:
        assert error.what


@settings(deadline=None)
@given(st.text(max_size=40), st.lists(st.text(max_size=20), max_size=2))
def test_any_text_is_a_recipe_or_a_user_error(text: str, overrides: list[str]) -> None:
    with pytest.raises(UserError):
        parse_recipe(text, overrides=overrides)
    with pytest.raises(UserError):
        parse_recipe(TEXT, overrides=["slo." + text])


yaml_noise = st.text("!!int &a*b<<:{}[],-?|>'\"#%@`\n 0x1e_.~nulltrue", max_size=30)


@settings(deadline=None)
@given(yaml_noise)
def test_yaml_syntax_noise_never_escapes_as_another_error(text: str) -> None:
    for candidate in (text, f"{TEXT}\n{text}", TEXT.replace("a test", text)):
        try:
            parse_recipe(candidate)
        except UserError as error:
            assert error.what
