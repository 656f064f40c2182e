"""Merges LoRA adapters into a loaded model, before the capture.

A weight becomes ``W + scale * B @ A``, summed in float64 and rounded once to float32. The merged model is the source
model of the run: the check of the capture and all measurements of quality are against the model with the adapter.

A parameter is replaced in its module alone. An output head that is tied to the embedding gets a weight
of the head alone where an adapter changes one of the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from optkit.checkpoint.adapter import Adapter, Update
from optkit.errors import UserError

ROWS = 4096  # of a weight in float64 at once


def merge_adapters(model: Any, adapters: Iterable[Adapter]) -> list[str]:
    """Merge ``adapters`` into ``model``, in place; a sentence for each, for the report.

    Raises:
        UserError: the model lacks a layer of an adapter or has another shape there, or two adapters replace a tensor.
    """
    replaced: set[str] = set()
    notes = []
    for adapter in adapters:
        twice = sorted(replaced & set(adapter.saved))
        if twice:
            raise UserError(
                f"two adapters replace {twice[0]}", where=str(adapter.directory), fix="give one of them"
            )
        replaced |= set(adapter.saved)
        for name, value in adapter.saved.items():
            replace_parameter(model, name, value, adapter)
        for name, update in adapter.updates.items():
            merge_update(model, name, update, adapter)
        counts = f"{len(adapter.updates)} layers" + (
            f", {len(adapter.saved)} replaced tensors" if adapter.saved else ""
        )
        notes.append(
            f"adapter {adapter.name:.200} merged: {adapter.summary}, {counts}, sha256 {adapter.digest[:16]}"
        )
    return notes


def replace_parameter(model: Any, name: str, value: Tensor, adapter: Adapter) -> None:
    module, _, key = name.rpartition(".")
    owner = module_of(model, module, adapter)
    before = getattr(owner, key, None)
    if not isinstance(before, torch.nn.Parameter):
        raise missing(name, adapter)
    check_shape(name, list(value.shape), list(before.shape), adapter)
    set_parameter(owner, key, finite(value.to(torch.float32), name, adapter))


def merge_update(model: Any, name: str, update: Update, adapter: Adapter) -> None:
    """Merge ``update`` into the weight of module ``name``."""
    owner = module_of(model, name, adapter)
    weight = getattr(owner, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise missing(name, adapter)
    embedding = isinstance(owner, torch.nn.Embedding)
    if embedding and update.magnitude is not None:
        raise UserError(f"DoRA of the embedding {name} is not supported", where=str(adapter.directory))
    stored_transposed = isinstance(owner, Conv1D) or embedding  # an embedding [V, K] is updated as [K, V]
    matrix = weight.detach().T if stored_transposed else weight.detach()
    check_shape(name, [update.b.shape[0], update.a.shape[1]], list(matrix.shape), adapter)
    new = finite(merged(matrix, update), name, adapter)
    set_parameter(owner, "weight", new.T.contiguous() if stored_transposed else new)


def merged(weight: Tensor, update: Update) -> Tensor:
    """``weight`` [N, K] with ``update``, float32; on the meta device a shape alone."""
    out = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    if weight.device.type == "meta":
        return out
    a = update.a.double()
    for rows in torch.arange(len(weight)).split(ROWS):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        value = weight[part].double() + update.scale * (update.b[part].double() @ a)
        if update.magnitude is not None:
            value *= (update.magnitude[part].double() / value.norm(dim=1))[:, None]
        out[part] = value
    return out


def finite(value: Tensor, name: str, adapter: Adapter) -> Tensor:
    """``value``; refused where a number is beyond float32, or the row of a DoRA update is zero."""
    if value.device.type != "meta" and not bool(value.isfinite().all()):
        what = f"with the adapter, {name:.100} has numbers that float32 does not hold"
        raise UserError(what, where=str(adapter.directory), fix=base_of(adapter))
    return value


def module_of(model: Any, name: str, adapter: Adapter) -> Any:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise missing(name, adapter) from error


def set_parameter(owner: Any, key: str, value: Tensor) -> None:
    setattr(owner, key, torch.nn.Parameter(value, requires_grad=False))


def missing(name: str, adapter: Adapter) -> UserError:
    what = f"the adapter changes {name:.100}, which is no linear layer or embedding of the model"
    return UserError(what, where=str(adapter.directory), fix=base_of(adapter))


def check_shape(name: str, given: list[int], present: list[int], adapter: Adapter) -> None:
    if given != present:
        what = f"the adapter's {name:.100} is {given}, the model's is {present}"
        raise UserError(what, where=str(adapter.directory), fix=base_of(adapter))


def base_of(adapter: Adapter) -> str:
    return f"give its base model{f', {adapter.base:.100}' if adapter.base else ''}"
