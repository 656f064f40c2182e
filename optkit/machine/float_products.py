"""Float32 products on a CPU: by PyTorch's own choice of a library, or by oneDNN.

On x86 PyTorch multiplies float32 by Intel's MKL, which takes 1.0 to 3.5 times as long as oneDNN on an AMD EPYC
(docs/lab-notes.md). Kernels, the measured ceiling and the predictions of plans all follow ``by_onednn``.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import TYPE_CHECKING

from optkit.machine.target import cpu_vendor

if TYPE_CHECKING:
    from torch import Tensor

    from optkit.machine.target import Target


def runs_by_onednn(target: Target) -> bool:
    """True for the CPU at hand, if its float32 products run by oneDNN."""
    return target.name == "cpu" and by_onednn(target.isa)


def by_onednn(isa: Collection[str]) -> bool:
    """True for products by oneDNN: on x86 CPUs with AVX2 whose vendor is not Intel, where PyTorch has oneDNN.

    The vendor is that of the CPU at hand.
    """
    return "avx2" in isa and cpu_vendor() != "GenuineIntel" and has_onednn()


@cache
def has_onednn() -> bool:
    """True where the installed PyTorch has oneDNN, and its linear layer for plain weights."""
    import torch

    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` by oneDNN, from plain weights: [..., K] and [N, K] give [..., N], all float32."""
    import torch

    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product
