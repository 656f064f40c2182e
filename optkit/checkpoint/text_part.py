"""The text decoder of a multimodal checkpoint, as a checkpoint of its own.

A multimodal ("composite") configuration has the decoder's configuration inside, and the decoder's tensors carry a
prefix. ``text_part`` gives the decoder alone: the configuration of a text model, and its tensors under the names of
that model. Tensors of other parts (vision, audio, projectors, prediction heads for speculation) are not in the result
and are never read.

=========================================  ==============================
name in the files                          name of the text model
=========================================  ==============================
``model.language_model.layers.0...``       ``model.layers.0...``
``language_model.model.layers.0...``       ``model.layers.0...``
``language_model.lm_head.weight``          ``lm_head.weight``
``lm_head.weight``                         ``lm_head.weight``
``model.layers.0...`` without the others   ``model.layers.0...``
=========================================  ==============================

Multimodal RoPE gives a token three positions; for text all three are equal, and the angles are those of plain RoPE.
So a decoder type without a class of its own for text is read as the plain type of the same layers (``PLAIN_TYPES``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optkit.checkpoint.validate import CheckpointInfo
from optkit.errors import UnsupportedModel, refusal

PARTS = ("text_config", "vision_config", "audio_config")
NAME = re.compile(
    r"(?:model\.language_model|language_model\.model)\.(?P<inner>.+)|(?:language_model\.)?(?P<head>lm_head(?:\..+)?)"
)
PLAIN = re.compile(r"model\.(?:layers|embed_tokens|norm)\..+")
HEAD = "lm_head.weight"
PLAIN_TYPES = {
    "qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe",
}  # fmt: skip
MULTIMODAL_ROPE = ("mrope_section", "mrope_interleaved")
OWN_KEYS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


@dataclass(frozen=True)
class TextPart:
    """The decoder of a multimodal checkpoint.

    Attributes:
        info: configuration and tensors, by their names in the text model.
        stored: the names in the files, by name in the text model.
        note: a sentence for users.
    """

    info: CheckpointInfo
    stored: dict[str, str]
    note: str


def text_part(directory: Path, info: CheckpointInfo) -> TextPart | None:
    """The decoder of the checkpoint ``info`` in ``directory``; None for a text model.

    Raises:
        UnsupportedModel: transformers does not know the model, or has no class for its decoder alone.
    """
    if not any(isinstance(info.config.get(part), dict) for part in PARTS):
        return None
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig  # seconds of imports

    where = str(directory)
    try:
        whole = AutoConfig.from_pretrained(directory, local_files_only=True)
        inner = whole.get_text_config(decoder=True)
        if inner is whole:
            return None
        config, kind = plain_config(inner.to_dict())
    except Exception as error:  # transformers checks values in several ways, each with exceptions of its own
        if isinstance(error, OSError) or refusal(error) is not None:
            raise
        what = f"transformers can't read its config: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UnsupportedModel(what, where=where) from error
    try:
        config_class = type(AutoConfig.for_model(kind))
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    except (ValueError, KeyError) as error:
        what = f"transformers has no text model for the decoder of {whole.model_type} ({inner.model_type})"
        raise UnsupportedModel(what, where=where) from error
    stored = text_names(set(info.tensors))
    config |= {
        "model_type": kind,
        "architectures": [model_class.__name__],
        "tie_word_embeddings": is_tied(whole, inner, stored, where),
    }
    for key in ("quantization_config", "eos_token_id", "bos_token_id", "pad_token_id"):
        if info.config.get(key) is not None and (key == "quantization_config" or config.get(key) is None):
            config[key] = info.config[key]
    tensors = {name: info.tensors[name_there] for name, name_there in stored.items()}
    left = len(info.tensors) - len(stored)
    note = (
        f"the text decoder ({kind}) of a {whole.model_type} model; {left} tensors of other parts are not read"
    )
    return TextPart(replace(info, config=config, tensors=tensors), stored, note)


def plain_config(config: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The configuration of the text model, without multimodal RoPE where the type is read as a plain one; the type."""
    kept = {key: value for key, value in config.items() if key not in OWN_KEYS}
    kind = str(kept["model_type"])
    if kind in PLAIN_TYPES:
        kind = PLAIN_TYPES[kind]
        rope = kept.get("rope_parameters") or {}
        kept["rope_parameters"] = {key: value for key, value in rope.items() if key not in MULTIMODAL_ROPE}
    return kept, kind


def is_tied(whole: Any, inner: Any, stored: Mapping[str, str], where: str) -> bool:
    """True where the output head is the embedding: the configuration says so, and no head is in the files.

    Raises:
        UnsupportedModel: the configuration asks for a head that the files lack.
    """
    if HEAD in stored:
        return False
    tied = any(bool(getattr(config, "tie_word_embeddings", False)) for config in (whole, inner))
    if stored and not tied:
        raise UnsupportedModel(f"the checkpoint has no tensor for {HEAD}", where=where)
    return tied


def text_name(name: str) -> str:
    """The name in the text model of a module or tensor of the whole model; other names stay."""
    match = NAME.fullmatch(name)
    if match is None:
        return name
    return match["head"] or f"model.{match['inner']}"


def text_names(names: set[str]) -> dict[str, str]:
    """The decoder's tensors of ``names``: the name in the files, by name in the text model."""
    found = {}
    for name in sorted(names):
        if NAME.fullmatch(name):
            found[text_name(name)] = name
    if any(name.startswith("model.") for name in found):
        return found
    return found | {name: name for name in sorted(names) if PLAIN.fullmatch(name)}
