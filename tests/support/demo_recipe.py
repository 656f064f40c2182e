"""A small recipe, two fake passes for its names, and the error line of a wrong recipe."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ConfigDict, Field

from optkit.errors import UserError
from optkit.passes.base import Stage
from optkit.passes.resolve import resolve_passes
from optkit.recipe.load import parse_recipe

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
    """Options of the fake pass ``int8``."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    lm_head: bool = False
    ignore: list[str] = []
    bits: int = Field(default=8, ge=2, le=8)


class EmptyConfig(BaseModel):
    """No options."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FakeInt8:
    """A fake pass ``int8``."""

    stage = Stage.QUANTIZE
    last_stage = None
    Config = Int8Config


class FakeFuse:
    """A fake pass ``fuse_qkv``."""

    stage = Stage.FUSE
    last_stage = None
    Config = EmptyConfig


def message(text: str, *overrides: str, resolve: bool = False) -> str:
    """The error line for ``text`` with ``overrides``; ``resolve`` also checks the passes."""
    with pytest.raises(UserError) as caught:
        recipe = parse_recipe(text, "r.yaml", overrides)
        if resolve:
            resolve_passes(recipe)
    line = str(caught.value)
    assert "\n" not in line
    return line
