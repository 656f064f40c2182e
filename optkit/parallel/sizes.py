"""The numbers of ranks for a model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from optkit.errors import UserError
from optkit.graph.schema import MAX_RANKS

if TYPE_CHECKING:
    from optkit.graph.ir import GraphMeta

# In a graph's annotations: the number of ranks that share each layer, or that have some of the layers each.
TENSOR_PARALLEL, PIPELINE_PARALLEL = "tensor_parallel", "pipeline_parallel"


def good_sizes(meta: GraphMeta) -> list[int]:
    """The numbers of ranks among which all layers' KV heads are shared out evenly; [1] where ranks can't share."""
    heads = [spec.num_kv_heads for spec in meta.kv_specs]
    common = math.gcd(*heads) if heads else 1
    return [size for size in range(1, min(common, MAX_RANKS) + 1) if common % size == 0]


def check_size(meta: GraphMeta, size: int, where: str) -> None:
    """Refuse a number of ranks beyond the shares of the model; only facts of graph.json are read.

    Raises:
        UserError: heads are not shared out evenly, or a state has no shares; the message has the working sizes.
    """
    if size == 1:
        return
    fix = f"sizes that work: {', '.join(map(str, good_sizes(meta)))}"
    if meta.recurrent_specs:
        raise UserError("a recurrent state is not shared by ranks", where=where, fix="sizes that work: 1")
    if any(spec.latent for spec in meta.kv_specs):
        what = "latent KV has one head, which all queries read, and is not shared by ranks"
        raise UserError(what, where=where, fix="sizes that work: 1")
    if size not in good_sizes(meta):
        heads = sorted({spec.num_kv_heads for spec in meta.kv_specs})
        many = " and ".join(map(str, heads))
        raise UserError(f"{size} ranks can't share {many} KV heads evenly", where=where, fix=fix)


def check_stages(meta: GraphMeta, size: int, where: str) -> None:
    """Refuse a number of stages that the model can't have; only facts of graph.json are read.

    Raises:
        UserError: more stages than layers with KV, or a recurrent state.
    """
    if size == 1:
        return
    if meta.recurrent_specs:
        raise UserError("a recurrent state is kept by one process", where=where, fix="sizes that work: 1")
    most = min(len(meta.kv_specs), MAX_RANKS)
    if size > most:
        raise UserError(
            f"{most} layers with attention are no {size} stages", where=where, fix=f"use at most {most}"
        )
