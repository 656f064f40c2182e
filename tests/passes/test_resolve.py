"""A recipe's passes: names, options, order, and the JSON Schema."""

from __future__ import annotations

import pytest
import yaml

import optkit.passes
from optkit.errors import UserError
from optkit.passes.resolve import Alternatives, recipe_json_schema, resolve_passes
from optkit.recipe.load import parse_recipe
from tests.support.demo_recipe import TEXT, FakeFuse, FakeInt8, Int8Config, message


@pytest.fixture
def pass_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the table of passes by the fake passes."""
    classes = {"fuse_qkv": FakeFuse, "int8": FakeInt8}
    monkeypatch.setattr(optkit.passes, "PASSES", {name: f"fake:{name}" for name in classes}, raising=False)
    monkeypatch.setattr(optkit.passes, "load", classes.__getitem__, raising=False)


@pytest.mark.usefixtures("pass_table")
def test_resolve_passes_gives_each_pass_its_config() -> None:
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
def test_resolve_passes_names_place_and_remedy_when_a_name_or_option_is_wrong(
    old: str, new: str, parts: list[str]
) -> None:
    line = message(TEXT.replace(old, new), resolve=True)
    for part in parts:
        assert part in line


@pytest.mark.usefixtures("pass_table")
def test_resolve_passes_refuses_passes_out_of_order() -> None:
    text = TEXT.replace("  fuse_qkv: {}\n", "").replace("accept: {min", "  fuse_qkv: {}\naccept: {min")
    line = message(text, resolve=True)
    assert "r.yaml:12: 'fuse_qkv' must come before 'int8'" in line
    assert "the order is: fuse, transform, quantize, kernels, compile" in line


@pytest.mark.parametrize(
    ("order", "refused"),
    [
        ("fuse_qkv flash_attention int8 kv_int8", None),
        ("fuse_qkv int8 flash_attention kv_int8", None),
        ("kv_int8 flash_attention", None),
        ("flash_attention fuse_qkv", None),
        ("int8 flash_attention fuse_qkv", "'fuse_qkv' must come before 'int8'"),
        ("compile flash_attention", "'flash_attention' must come before 'compile'"),
    ],
)
def test_flash_attention_has_several_places(order: str, refused: str | None) -> None:
    passes = ", ".join(f"{name}: {{}}" for name in order.split())
    recipe = parse_recipe(f"schema_version: 1\nname: r\npasses: {{{passes}}}\n")
    if refused is None:
        assert [one.entry.name for one in resolve_passes(recipe)] == order.split()
    else:
        with pytest.raises(UserError, match=refused):
            resolve_passes(recipe)


@pytest.mark.usefixtures("pass_table")
def test_recipe_json_schema_accepts_a_recipe_and_refuses_a_typo() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = recipe_json_schema()
    data = yaml.safe_load(TEXT.replace("1e-2", "0.01"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(data, schema)
    data["passes"]["int8"]["lm_hed"] = True
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schema)


@pytest.mark.usefixtures("pass_table")
def test_resolve_passes_names_the_override_when_an_overridden_option_is_wrong() -> None:
    assert "--set passes.int8.bits=16" in message(TEXT, "passes.int8.bits=16", resolve=True)


@pytest.mark.usefixtures("pass_table")
def test_resolve_passes_gives_alternatives_their_candidates() -> None:
    text = """
schema_version: 1
name: r
passes: {layers: {one_of: [{fuse_qkv: {}, int8: {}}, {int8: {lm_head: true}}]}}
"""
    (layers,) = resolve_passes(parse_recipe(text))
    assert isinstance(layers, Alternatives) and layers.name == "layers"
    names = [[resolved.entry.name for resolved in candidate] for candidate in layers.candidates]
    assert names == [["fuse_qkv", "int8"], ["int8"]]
    assert layers.candidates[1][0].config == Int8Config(lm_head=True)


@pytest.mark.usefixtures("pass_table")
@pytest.mark.parametrize(
    ("passes", "line"),
    [
        ("{layers: {one_of: [{int8: {}, fuse_qkv: {}}]}}", "'fuse_qkv' must come before 'int8'"),
        (
            "{layers: {one_of: [{int8: {}}, {fuse_qkv: {}}]}, fuse_qkv: {}}",
            "'fuse_qkv' must come before 'int8'",
        ),
        ("{int8: {}, layers: {one_of: [{int8: {}}, {fuse_qkv: {}}]}}", "'fuse_qkv' must come before 'int8'"),
        ("{layers: {one_of: [{int9: {}}]}}", "unknown pass 'int9'"),
        ("{layers: {oneof: [{int8: {}}]}}", "write 'one_of' in place of 'oneof'"),
        ("{int8: {one_of: [{int8: {}}]}}", "'int8' is a pass"),
        ("{layers: {one_of: [{int8: {bits: 16}}]}}", "passes.layers.one_of.0.int8.bits"),
    ],
)
def test_resolve_passes_checks_candidates_like_passes(passes: str, line: str) -> None:
    text = f"schema_version: 1\nname: r\npasses: {passes}\n"
    assert line in message(text, resolve=True)


@pytest.mark.usefixtures("pass_table")
def test_recipe_json_schema_accepts_alternatives_and_refuses_an_unknown_pass_among_them() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    data = {"schema_version": 1, "name": "r", "passes": {"layers": {"one_of": [{"int8": {}}]}}}
    jsonschema.validate(data, recipe_json_schema())
    data["passes"] = {"layers": {"one_of": [{"int9": {}}]}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, recipe_json_schema())
