"""GPTQ's layers are read as the numbers that they were packed from, for all bits, groups and orders."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.packers import BITS_AND_GROUPS, GPTQ, gptq, one_layer


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("options", BITS_AND_GROUPS)
def test_gptq_layers(tmp_path: Path, version: str, options: dict[str, Any]) -> None:
    config = GPTQ | {
        "checkpoint_format": version,
        "bits": options.get("bits", 4),
        "group_size": options.get("group", 32) or -1,
        "sym": options.get("symmetric", True),
        "desc_act": options.get("act_order", False),
    }
    layer, plain = one_layer(tmp_path, partial(gptq, version=version), config, **options)
    torch.testing.assert_close(layer.float_weight(), plain.weight())
    assert ("weight_zero_point" not in layer.operands) == options.get("symmetric", True)
    assert ("weight_g_idx" not in layer.operands) != options.get("act_order", False)


def test_gptq_layers_may_have_bits_of_their_own(tmp_path: Path) -> None:
    config = GPTQ | {"bits": 4, "group_size": 128, "dynamic": {"+:a": {"bits": 8, "group_size": 32}}}
    layer, plain = one_layer(tmp_path, gptq, config, bits=8)
    torch.testing.assert_close(layer.float_weight(), plain.weight())
