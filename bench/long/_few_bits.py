"""KV rounded to few bits in the attention of transformers: schemes, their bytes, and the loss of quality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optkit.evaluation.quality import Estimate, compare_rows, mean_estimate
from optkit.kernels.reference import dequantize_kv, quantize_kv

BLOCK = 32  # tokens
PARAMETER_BYTES = 4  # a scale and a zero point, in half precision


@dataclass(frozen=True)
class Scheme:
    """Bits of K and V; with ``channel`` keys share scales along a block, else the numbers of a token and head do."""

    name: str
    k_bits: int
    v_bits: int
    channel: bool = True
    group: int = 64  # numbers of a token and head that share a scale

    def token_bytes(self, dim: int) -> float:
        """Bytes of a token and head in K and V, scales included."""
        scales = dim / BLOCK if self.channel else dim / self.group
        return dim * (self.k_bits + self.v_bits) / 8 + PARAMETER_BYTES * (scales + dim / self.group)


INT8 = "int8 by token, as it is"
SCHEMES = (
    Scheme("K8 channel, V4 token", 8, 4),
    Scheme("K4 channel, V8 token", 4, 8),
    Scheme("K6 channel, V6 token", 6, 6),
    Scheme("K5 channel, V5 token", 5, 5),
    Scheme("K4 channel, V4 token", 4, 4),
    Scheme("K4 channel, V4 groups of 32", 4, 4, group=32),
    Scheme("K4 token, V4 token", 4, 4, channel=False),
    Scheme("K2 channel, V2 groups of 32", 2, 2, group=32),
)


def rounded(x: Tensor, bits: int, dim: int) -> Tensor:
    """``x`` at the nearest of ``2 ** bits`` even steps between the extremes along ``dim``.

    The step and the smallest number are half precision, as they would be stored.
    """
    low, high = x.amin(dim, keepdim=True).half().float(), x.amax(dim, keepdim=True)
    step = ((high - low) / (2**bits - 1)).half().float().clamp_min(1e-7)
    return ((x - low) / step).round().clamp(0, 2**bits - 1) * step + low


def int8_rows(x: Tensor) -> Tensor:
    """``x`` [..., D] as in an int8 pool."""
    return dequantize_kv(quantize_kv(x))


def packed(x: Tensor, bits: int, channel: bool, group: int) -> Tensor:
    """``x`` [B, H, T, D] rounded by channels of blocks of ``BLOCK`` tokens, which T is a multiple of, or by tokens."""
    if channel:
        return rounded(x.unflatten(2, (-1, BLOCK)), bits, 3).flatten(2, 3)
    return rounded(x.unflatten(3, (-1, group)), bits, 4).flatten(3, 4)


class Attention:
    """Attention of transformers over quantized KV; ``scheme`` None is float32, ``INT8`` the rows of today's pool."""

    def __init__(self) -> None:
        self.scheme: Scheme | str | None = None

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        shared, length = query.shape[1] // key.shape[1], key.shape[2]
        near_k, near_v = (key, value) if self.scheme is None else (int8_rows(key), int8_rows(value))
        far_k, far_v = near_k, near_v
        if isinstance(self.scheme, Scheme):
            whole, scheme = length // BLOCK * BLOCK, self.scheme
            far_k, far_v = near_k.clone(), near_v.clone()
            far_k[:, :, :whole] = packed(key[:, :, :whole], scheme.k_bits, scheme.channel, scheme.group)
            far_v[:, :, :whole] = packed(value[:, :, :whole], scheme.v_bits, False, scheme.group)
        place = torch.arange(length)
        near = place[:, None] // BLOCK == place[None] // BLOCK
        both = [x.repeat_interleave(shared, 1) for x in (near_k, near_v, far_k, far_v)]
        scores = torch.where(near, query @ both[0].mT, query @ both[2].mT) * scaling
        weights = scores.masked_fill(place[:, None] < place[None], float("-inf")).softmax(-1)
        out = (weights * near) @ both[1] + (weights * ~near) @ both[3]
        return out.transpose(1, 2), None


@dataclass(frozen=True)
class Quality:
    """KL divergence in nats and agreement of the most likely token, against float32 KV."""

    kl: Estimate
    agreement: Estimate


@torch.inference_mode()
def qualities(directory: Path, windows: Sequence[Sequence[int]]) -> dict[str, Quality]:
    """The quality of int8 and of each scheme, over all positions of ``windows``."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    attention = Attention()
    AttentionInterface.register("bench_kv_bits", attention)
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True, attn_implementation="bench_kv_bits"
    ).eval()
    kl: dict[str, list[Tensor]] = {}
    same: dict[str, list[Tensor]] = {}
    for window in windows:
        ids = torch.tensor([list(window)])
        attention.scheme = None
        wanted = model(ids, use_cache=False).logits[0]
        for scheme in (INT8, *SCHEMES):
            attention.scheme = scheme
            name = scheme if isinstance(scheme, str) else scheme.name
            pair = compare_rows(wanted, model(ids, use_cache=False).logits[0])
            for found, values in zip((kl, same), pair, strict=True):
                found.setdefault(name, []).append(values)
    return {name: Quality(mean_estimate(kl[name]), mean_estimate(same[name])) for name in kl}
