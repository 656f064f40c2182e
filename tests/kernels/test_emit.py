"""Buffers for the int8 form of a result: a byte a value, a float32 scale a group."""

from __future__ import annotations

import pytest
import torch

from optkit.kernels.cpu.call_list import TOKENS
from optkit.kernels.cpu.emit import Quantization, quantized_buffers
from optkit.kernels.cpu.program import Builder


@pytest.mark.parametrize(("group_size", "groups", "channels"), [(0, 1, 96), (32, 3, 32)])
def test_buffers_have_a_byte_a_value_and_a_scale_a_group(group_size: int, groups: int, channels: int) -> None:
    b = Builder()
    like = b.buffer(TOKENS, (96,))
    q, scale, group = quantized_buffers(b, like, Quantization(group_size, keep=False))
    assert (q.rows, q.shape, q.dtype) == (TOKENS, (96,), torch.uint8)
    assert (scale.rows, scale.shape, scale.dtype) == (TOKENS, (groups,), torch.float32)
    assert group == channels
    assert [buffer.row_bytes for buffer in b.buffers] == [384, 128, 64]  # whole cache lines


def test_result_in_float_alone_has_no_further_buffers() -> None:
    b = Builder()
    like = b.buffer(TOKENS, (96,))
    assert quantized_buffers(b, like, None) == (None, None, 0)
    assert len(b.buffers) == 1
