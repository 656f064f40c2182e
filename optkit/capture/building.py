"""Models built by transformers from a checkpoint of a stranger, after their tensors were compared with the config.

transformers takes memory for every parameter of the config, and fills a parameter without a tensor with random
numbers. Here a tensor that is missing, of another shape, or without finite values is an ``UnsupportedModel``, most of
them before memory is taken for the model.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from optkit.capture import boundary
from optkit.capture.experts import checkpoint_origins
from optkit.capture.loading import class_of, refusals
from optkit.checkpoint.source import Source
from optkit.checkpoint.validate import INDEX, SINGLE
from optkit.errors import UnsupportedModel, printable

# Of a model's parameters, for each number in the checkpoint, where tensors can't be compared.
MOST_NUMBERS = 4


def build_model(
    model_class: Any,
    source: Source,
    config: Any,
    tensors: Mapping[str, Tensor] | None = None,
    notes: list[str] | None = None,
) -> Any:
    """The float32 model with all parameters from the checkpoint, in the attention of ``boundary.built``.

    Args:
        model_class: has ``from_pretrained``.
        tensors: in place of the tensors in the directory of ``source``.
        notes: gets a sentence about tensors that the model does not use.

    Raises:
        UnsupportedModel: transformers can't build the model, or a tensor is missing or has another shape.
    """
    where = str(source.directory)
    stored = source.info.tensors if tensors is None else tensors
    refuse_other_tensors(config, source, {name: tuple(value.shape) for name, value in stored.items()})
    try:
        with refusals(where):
            model, report = boundary.built(
                lambda attention: model_class.from_pretrained(
                    source.directory if tensors is None else None,
                    config=config,
                    state_dict=tensors,
                    attn_implementation=attention,
                    dtype=torch.float32,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,
                    local_files_only=True,
                )
            )
    except UnsupportedModel:
        refuse_missing(config, source)
        raise
    refuse_report(config, source, report["mismatched_keys"], report["missing_keys"])
    if report["unexpected_keys"] and notes is not None:
        notes.append(unused_note(report["unexpected_keys"]))
    for name, parameter in model.named_parameters():
        if 0 not in parameter.stride():  # no stand-in for a weight that is read later
            refuse_not_finite(name, parameter.data, where)
    return model


def unused_note(names: Collection[str]) -> str:
    """A sentence about tensors of a checkpoint that belong to no parameter, such as a layer beyond the config's."""
    count = f"{len(names)} tensors" if len(names) > 1 else "a tensor"
    return f"the model of config.json does not use {count} of the checkpoint, such as {printable(min(names))}"


def refuse_not_finite(name: str, weight: Tensor, where: str) -> None:
    """Refuse a weight with NaN or an infinite value, which a few tokens may never show.

    Raises:
        UnsupportedModel: a value is not finite.
    """
    ends = (weight.float() if weight.dtype.itemsize == 1 else weight).aminmax() if weight.numel() else ()
    if not all(map(torch.isfinite, ends)):
        what = f"the weight {name} has values that are NaN or infinite"
        raise UnsupportedModel(what, where=where, fix="download or copy the checkpoint again")


def refuse_report(
    config: Any, source: Source, mismatched: set[tuple[str, Any, Any]], missing: set[str]
) -> None:
    """Refuse a model with parameters of another shape than their tensors, or without a tensor."""
    where = str(source.directory)
    if mismatched:
        refuse_missing(config, source)
        name, given, expected = min(mismatched)
        what = f"{name} is {list(given)} in the checkpoint, and {list(expected)} by its config"
        raise UnsupportedModel(what, where=where)
    if missing:
        raise UnsupportedModel(f"the checkpoint has no tensor for {min(missing)}", where=where)


def refuse_other_tensors(config: Any, source: Source, stored: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse tensors of the shapes ``stored`` in contradiction to the model, before the model takes memory.

    transformers takes memory for each parameter without a tensor. Here the conversion is on the meta device, with
    shapes alone. Where the conversion fails, for example by reading values, only the sizes are compared.

    Raises:
        UnsupportedModel: a parameter has no tensor, or another shape, or the config is of a far larger model.
    """
    where = str(source.directory)
    with refusals(where), torch.device("meta"):
        model = class_of(config, where)(config)
        tensors = {name: torch.empty(shape) for name, shape in stored.items()}
    numbers, given = sum(p.numel() for p in model.parameters()), sum(map(math.prod, stored.values()))
    try:
        found = differences(model, tensors)
    except Exception as error:
        if numbers > MOST_NUMBERS * given:
            what = f"its config is of a model with {numbers:,} parameters, the checkpoint has {given:,}"
            fix = "take config.json and weights of the same model"
            raise UnsupportedModel(what, where=where, fix=fix) from error
    else:
        refuse_report(config, source, *found)


def differences(model: Any, tensors: Mapping[str, Tensor]) -> tuple[set[tuple[str, Any, Any]], set[str]]:
    """Parameters of another shape than their tensors, with both shapes, and parameters without a tensor.

    Model and tensors are on the meta device.

    Raises:
        Exception: of any type, where a conversion fails there.
    """
    conversions: Any = get_model_conversion_mapping(model)
    options = LoadStateDictConfig(device_map={"": torch.device("meta")}, weight_mapping=conversions)
    convert = convert_and_load_state_dict_in_model
    # transformers 5.15 asks for a plan of tensor parallelism
    plan = {"tp_plan": None} if "tp_plan" in inspect.signature(convert).parameters else {}
    report, _ = convert(model, dict(tensors), options, **plan)
    if report.conversion_errors:
        raise ValueError(f"transformers can't convert {min(report.conversion_errors)} without values")
    missing = set(report.missing_keys)
    for pair in model.all_tied_weights_keys.items():  # one of the two is enough
        missing -= set(pair) if not missing.issuperset(pair) else {pair[0]}
    ignored = model._keys_to_ignore_on_load_missing or ()
    return report.mismatched_keys, {n for n in missing if not any(re.search(p, n) for p in ignored)}


def refuse_missing(config: Any, source: Source) -> None:
    """Refuse a checkpoint that has some of the tensors of a parameter, such as a layer's experts, and lacks others.

    transformers stacks the tensors that it finds; its own error has a shape at most, and no name.
    """
    missing: list[str] = []
    with suppress(UnsupportedModel), refusals(str(source.directory)):
        with torch.device("meta"):
            model = class_of(config, str(source.directory))(config)
        missing = missing_parts(model, source)
    if missing:
        index, single = source.directory / INDEX, source.directory / SINGLE
        raise UnsupportedModel(
            f"the tensor {missing[0]} is missing", where=str(index if index.is_file() else single)
        )


def missing_parts(model: Any, source: Source) -> list[str]:
    """The tensors of ``model`` that ``source`` lacks, of parameters with another tensor in ``source``."""
    missing = []
    for origin in checkpoint_origins(model).values():
        absent = [
            part.name
            for part in origin.parts
            if part.name not in source and part.name.rpartition(".")[0] not in source.layers
        ]
        missing += absent if len(absent) < len(origin.parts) else []
    return missing
