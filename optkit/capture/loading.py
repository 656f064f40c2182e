"""Models and configurations built by transformers from a checkpoint of a stranger; a refusal is a line for users.

transformers checks a configuration in several ways, each with exceptions of its own, and fills a parameter without a
tensor with random numbers. Here any such failure is an ``UnsupportedModel``, and so is a parameter without a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from optkit.capture import boundary
from optkit.errors import UnsupportedModel, UserError, first_line, refusal


@contextmanager
def refusals(where: str) -> Iterator[None]:
    """Around calls of transformers alone: errors become ``UnsupportedModel``.

    Errors of memory and of the operating system, such as a file without permission, pass unchanged.
    """
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if refusal(error) is not None:
            raise
        raise UnsupportedModel(reason(error), where=where) from error


def reason(error: Exception) -> str:
    """The refusal for an error of transformers; the text of a ``KeyError`` is a key alone."""
    kind = "KeyError " if isinstance(error, KeyError) else ""
    return f"transformers can't build it: {kind}{first_line(error)}"


def read_config(directory: Path) -> Any:
    """The configuration in ``directory``.

    Raises:
        UnsupportedModel: transformers does not know the type, or a value is wrong.
    """
    with refusals(str(directory)):
        return AutoConfig.from_pretrained(directory, local_files_only=True)


def build_model(model_class: Any, checkpoint: Path | None, *, where: str, **options: Any) -> Any:
    """The float32 model with all parameters from the checkpoint, in the attention of ``boundary.built``.

    Args:
        model_class: has ``from_pretrained``.
        checkpoint: a directory, or None where ``options`` has the tensors.

    Raises:
        UnsupportedModel: transformers can't build the model, or a tensor is missing or has another shape.
    """
    with refusals(where):
        model, report = boundary.built(
            lambda attention: model_class.from_pretrained(
                checkpoint,
                attn_implementation=attention,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **options,
            )
        )
    if report["mismatched_keys"]:
        name, given, expected = min(report["mismatched_keys"])
        what = f"{name} is {list(given)} in the checkpoint, and {list(expected)} by its config"
        raise UnsupportedModel(what, where=where)
    if report["missing_keys"]:
        raise UnsupportedModel(f"the checkpoint has no tensor for {min(report['missing_keys'])}", where=where)
    return model
