"""Opaque ops: kernels as black boxes for a compiler.

A kernel may pack weights, loop over sequences in Python, or call C++ by address, which a compiler cannot trace. A
kernel registered as a PyTorch operator (``torch.ops.optkit.*``) is a black box with a schema and a shape rule. Both
come from the op's reference: the schema from the signature, the shapes from a run on the meta device. In the place of
a packed weight, the shape rule reads the weight before packing.

An operator is registered once for each kernel and shape of packed weight, and lives as long as the process. The name
is a hash of the two, so code compiled by one process finds the operator in another process.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from optkit.graph import ops
from optkit.kernels.reference import attention

Shapes = Mapping[int, Tensor]  # argument position -> meta tensor of the weight before packing

_operators: dict[Any, Any] = {}
_library: list[torch.library.Library] = []


def operator(reference: Callable[..., Any], kernel: Callable[..., Any], unpacked: Shapes) -> Any:
    """The operator for ``kernel``, with the signature and the shapes of ``reference``."""
    shapes = tuple((i, tuple(t.shape), t.dtype) for i, t in sorted(unpacked.items()))
    key = (reference, kernel, shapes)
    if key not in _operators:
        module = re.sub(r"\W", "_", kernel.__module__.rpartition(".")[2])
        digest = hashlib.sha256(f"{kernel.__module__}.{kernel.__qualname__} {shapes}".encode()).hexdigest()
        name = f"{module}_{reference.__name__}_{digest[:12]}"
        register(name, reference, kernel, dict(unpacked))
        _operators[key] = getattr(torch.ops.optkit, name).default
    return _operators[key]


def register(name: str, reference: Callable[..., Any], kernel: Callable[..., Any], unpacked: Shapes) -> None:
    library = optkit_library()
    op = ops.record_of(reference)
    mutated = op.mutates if op else ()
    library.define(name + torch.library.infer_schema(reference, mutates_args=mutated))
    run = true_rows(kernel) if reference is attention else kernel
    library.impl(name, contiguous(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"optkit::{name}", shape_rule(reference, unpacked), lib=library)


def optkit_library() -> torch.library.Library:
    """The operator namespace ``optkit``, made on first use; an import of the module registers nothing."""
    if not _library:
        _library.append(torch.library.Library("optkit", "FRAGMENT"))
    return _library[0]


def true_rows(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Attention in a padded step: the first rows, as many as ``slot_mapping`` has, by ``kernel``; zeros in the other
    rows.
    """

    def run(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, *rest: Any,
            **kwargs: Any) -> Tensor:  # fmt: skip
        tokens = slots.shape[0]
        if q.shape[0] == tokens:
            return kernel(q, k, v, k_cache, v_cache, slots, *rest, **kwargs)
        out = kernel(q[:tokens], k[:tokens], v[:tokens], k_cache, v_cache, slots, *rest, **kwargs)
        return torch.cat((out, out.new_zeros(q.shape[0] - tokens, *out.shape[1:])))

    return run


def contiguous(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel with results laid out as the shape rule says: contiguous. Most already are."""

    def run(*args: Any, **kwargs: Any) -> Any:
        out = kernel(*args, **kwargs)
        return out.contiguous() if isinstance(out, Tensor) else tuple(t.contiguous() for t in out)

    return run


def shape_rule(reference: Callable[..., Any], unpacked: Shapes) -> Callable[..., Any]:
    """Shapes and dtypes of the results, for symbolic sizes too."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        device = args[0].device
        shown = [unpacked.get(i, argument) for i, argument in enumerate(args)]
        shown = tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), shown)
        out = reference(*shown, **kwargs)
        return tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device=device), out)

    return rule
