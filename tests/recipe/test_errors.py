"""Errors of recipes and overrides: key, place and remedy."""

from __future__ import annotations

import pytest

from optkit.recipe.load import parse_recipe
from tests.support.demo_recipe import TEXT, message


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
        (
            "64}",
            "64, histogram: [[128, 1.0e+300]]}",
            ["r.yaml:4", "workload.histogram.0.1", "less than or equal to"],
        ),
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
def test_explain_names_place_and_remedy_when_a_recipe_is_wrong(old: str, new: str, parts: list[str]) -> None:
    assert old in TEXT
    line = message(TEXT.replace(old, new))
    for part in parts:
        assert part in line


def test_apply_override_reads_yaml_scalars() -> None:
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


def test_apply_override_adds_a_section_when_the_file_has_none() -> None:
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
def test_apply_override_names_the_argument_when_an_override_is_wrong(override: str, parts: list[str]) -> None:
    line = message(TEXT, override)
    for part in parts:
        assert part in line
