"""The numbers of ranks for a model, by tensor parallel and by pipeline parallel."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from optkit.errors import UserError
from optkit.graph.schema import MAX_RANKS

if TYPE_CHECKING:
    from optkit.graph.ir import GraphMeta

# In a graph's annotations: the number of ranks that share each layer, or that have some of the layers each.
TENSOR_PARALLEL, PIPELINE_PARALLEL = "tensor_parallel", "pipeline_parallel"
NOT_BOTH = "tensor parallel and pipeline parallel can't be combined"


def that_work(sizes: Iterable[int]) -> str:
    """The advice to use one of ``sizes``."""
    return f"sizes that work: {', '.join(map(str, sizes))}"


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
    fix = that_work(good_sizes(meta))
    if meta.recurrent_specs:
        what = "tensor parallel does not support recurrent layers"
        raise UserError(what, where=where, fix=that_work([1]))
    if any(spec.latent for spec in meta.kv_specs):
        what = "latent KV has one head, which all queries read, and is not shared by ranks"
        raise UserError(what, where=where, fix=that_work([1]))
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
        what = "pipeline parallel does not support recurrent layers"
        raise UserError(what, where=where, fix=that_work([1]))
    most = min(len(meta.kv_specs), MAX_RANKS)
    if size > most:
        what = f"{size} stages need as many layers with attention, and the model has {len(meta.kv_specs)}"
        raise UserError(what, where=where, fix=f"use at most {most}")


def check_alone(annotations: Mapping[str, Any], kind: str, where: str) -> None:
    """Refuse ``kind`` for a graph that other ranks share already, as its annotations say.

    Raises:
        UserError: the graph has been given to ranks of the other kind.
    """
    (other,) = {TENSOR_PARALLEL, PIPELINE_PARALLEL} - {kind}
    if other in annotations:
        raise UserError(NOT_BOTH, where=where, fix=f"leave out {kind} or {other}")
