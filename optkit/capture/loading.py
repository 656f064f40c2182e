"""Models and configurations built by transformers from a checkpoint of a stranger; a refusal is a line for users.

transformers checks a configuration in several ways, each with exceptions of its own, and fills a parameter without a
tensor with random numbers. Here any such failure is an ``UnsupportedModel``, and so is a parameter without a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig

from optkit.capture import boundary
from optkit.capture.experts import checkpoint_origins
from optkit.checkpoint.source import Source
from optkit.checkpoint.validate import INDEX, SINGLE
from optkit.errors import UnsupportedModel, UserError, first_line, refusal


@contextmanager
def refusals(
    where: str, failure: str = "transformers can't build it", *, typed: bool = False
) -> Iterator[None]:
    """Around calls of transformers alone: errors become ``UnsupportedModel``, ``failure`` with the cause.

    Errors of memory and of the operating system, such as a file without permission, pass unchanged.

    Args:
        typed: the cause begins with the error's type; else only that of a ``KeyError``, whose text is a key alone.
    """
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if refusal(error) is not None:
            raise
        kind = f"{type(error).__name__}: " if typed else "KeyError " if isinstance(error, KeyError) else ""
        raise UnsupportedModel(f"{failure}: {kind}{first_line(error)}", where=where) from error


def read_config(directory: Path) -> Any:
    """The configuration in ``directory``.

    Raises:
        UnsupportedModel: transformers does not know the type, or a value is wrong.
    """
    where = str(directory)
    with refusals(where):
        kind = PretrainedConfig.get_config_dict(directory, local_files_only=True)[0].get("model_type")
        if isinstance(kind, str) and kind not in CONFIG_MAPPING:
            what = f"transformers {transformers.__version__} does not know the model type '{kind:.60}'"
            raise UnsupportedModel(what, where=where, fix="install a version that does")
        return AutoConfig.from_pretrained(directory, local_files_only=True)


def class_of(config: Any, where: str) -> Any:
    """The class of the causal language model with ``config``.

    Raises:
        UnsupportedModel: there is none.
    """
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise UnsupportedModel(f"'{config.model_type}' is no causal language model", where=where)
    return model_class


def build_model(
    model_class: Any, source: Source, config: Any, tensors: Mapping[str, Tensor] | None = None
) -> Any:
    """The float32 model with all parameters from the checkpoint, in the attention of ``boundary.built``.

    Args:
        model_class: has ``from_pretrained``.
        tensors: in place of the tensors in the directory of ``source``.

    Raises:
        UnsupportedModel: transformers can't build the model, or a tensor is missing or has another shape.
    """
    where = str(source.directory)
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
    if report["mismatched_keys"]:
        refuse_missing(config, source)
        name, given, expected = min(report["mismatched_keys"])
        what = f"{name} is {list(given)} in the checkpoint, and {list(expected)} by its config"
        raise UnsupportedModel(what, where=where)
    if report["missing_keys"]:
        raise UnsupportedModel(f"the checkpoint has no tensor for {min(report['missing_keys'])}", where=where)
    return model


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
