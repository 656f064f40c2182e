"""AWQ's layers are read as the numbers that they were packed from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.packers import AWQ, awq, one_layer


@pytest.mark.parametrize("group", [32, 0])
def test_awq_layers(tmp_path: Path, group: int) -> None:
    layer, plain = one_layer(tmp_path, awq, AWQ | {"group_size": group or -1}, symmetric=False, group=group)
    torch.testing.assert_close(layer.float_weight(), plain.weight())
