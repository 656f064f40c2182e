"""Configurations read by transformers from a checkpoint of a stranger; a refusal is a line for users.

transformers checks a configuration in several ways, each with exceptions of its own. Here any such failure is an
``UnsupportedModel``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig

from optkit.checkpoint.validate import MAX_JSON_BYTES, entries
from optkit.errors import UnsupportedModel, UserError, first_line, refusal
from optkit.untrusted_json import parse_json, read_bounded


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
    except UserError:
        raise
    except Exception as error:
        if refusal(error) is not None:
            raise
        refuse_unknown_value(error, Path(where, "config.json"))
        kind = f"{type(error).__name__}: " if typed else "KeyError " if isinstance(error, KeyError) else ""
        raise UnsupportedModel(f"{failure}: {kind}{first_line(error)}", where=where) from error


def refuse_unknown_value(error: Exception, file: Path) -> None:
    """Refuse a value of ``config.json`` unknown to transformers, whose error has the value alone.

    Raises:
        UnsupportedModel: with key and value.
    """
    value = error.name if isinstance(error, AttributeError) else error.args[0] if error.args else None
    if not isinstance(error, (AttributeError, KeyError)) or not isinstance(value, str) or not file.is_file():
        return
    config = parse_json(read_bounded(file, MAX_JSON_BYTES), str(file))
    key = next((key for key, given in entries(config) if given == value), None)
    if key is not None:
        fix = "correct it, or install a version of transformers that does"
        what = f"transformers {transformers.__version__} does not know the value '{value:.60}' of '{key:.60}'"
        raise UnsupportedModel(what, where=str(file), fix=fix) from error


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
