"""int8 codes of which two neighbours, multiplied by bytes, add up within 16 bits: ``reduce_range``.

AVX2 has one instruction for products of bytes, ``vpmaddubsw``, which adds the products of two neighbouring channels,
u8 times s8, in 16 bits. With codes like (127, 127) the sum saturates: 2 * 255 * 127 > 32767. The remedy of ONNX
Runtime (``reduce_range``) and NNCF (its overflow fix) is weights of 7 bits, with four times the squared rounding error.
But most neighbours are small or have different signs, and 255 * 128 still fits. So codes keep 8 bits, and each scale is
just large enough that two neighbours add up to 128 at most, in absolute value. With weights of SmolLM2-135M in groups
of 32 the squared error is 1.45 times that of 8 bits.
"""

from __future__ import annotations

from torch import Tensor

from optkit.kernels.cpu.int8 import MOST_OF_TWO


def least_scale(groups: Tensor) -> Tensor:
    """The least scale [N, G] for weights ``groups`` [N, G, g]; neighbours are channels 2i and 2i + 1."""
    even, odd = neighbours(groups)
    if even.shape[2] == 0:
        return groups.new_zeros(groups.shape[:2])
    return even.div(MOST_OF_TWO).add_(odd, alpha=1 / MOST_OF_TWO).abs_().amax(dim=2)


def fit(codes: Tensor) -> Tensor:
    """Codes [N, G, g], whole numbers as floats, in place: of two that were both rounded up the larger is reduced."""
    even, odd = neighbours(codes)
    total = even + odd
    over = total.abs() > MOST_OF_TWO
    if over.any():
        above = total[over].sign() * (total[over].abs() - MOST_OF_TWO)
        first = even[over].abs() >= odd[over].abs()
        even[over] -= above * first
        odd[over] -= above * ~first
    return codes


def neighbours(channels: Tensor) -> tuple[Tensor, Tensor]:
    """Views [N, G, g / 2] of the channels 2i and 2i + 1; without a last channel that has no neighbour."""
    paired = channels.shape[2] // 2 * 2
    return channels[..., 0:paired:2], channels[..., 1:paired:2]
