"""Host inputs of sampling on the device: each row's parameters and random number.

The sampler is the op ``sample`` (``kernels.reference.sample``), which makes the same choice as
``optkit.runtime.sampling.sampler``. Requests with further parameters (penalties, bias) are sampled on the host, see
``optkit.runtime.overlap``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from optkit.kernels import reference, select
from optkit.runtime.sampling.sampler import GREEDY_BELOW, uniform
from optkit.runtime.types import ScheduledRequest

if TYPE_CHECKING:
    from optkit.machine.target import Target

Sampler = Callable[..., Tensor]  # the signature of reference.sample
FAILED = -1  # the token of a row without a distribution


def sampler(target: Target | None) -> Sampler:
    """The op ``sample`` on ``target``: a kernel, or the reference."""
    kernel = select("sample", target)
    return kernel.fn if kernel else reference.sample


def sampling_inputs(items: Sequence[ScheduledRequest]) -> Mapping[str, np.ndarray]:
    """The parameters of the rows of ``items``; each item needs a row of logits."""
    params = [item.request.sampling for item in items]
    return {
        "temperature": np.array([p.temperature for p in params], dtype=np.float32),
        "top_p": np.array([p.top_p for p in params], dtype=np.float32),
        "min_p": np.array([p.min_p for p in params], dtype=np.float32),
        "top_k": np.array([p.top_k for p in params], dtype=np.int32),
        "uniform": np.array(
            [
                uniform(p.seed, item.request.num_output) if p.temperature >= GREEDY_BELOW else 0.0
                for p, item in zip(params, items, strict=True)
            ],
            dtype=np.float64,
        ),
    }


def has_filters(items: Sequence[ScheduledRequest]) -> bool:
    """True if a row is cut by top_k, top_p or min_p; finding the cut takes most of the sampler's launches."""
    params = [item.request.sampling for item in items]
    return any(p.temperature >= GREEDY_BELOW and (p.top_k or p.top_p < 1.0 or p.min_p) for p in params)
