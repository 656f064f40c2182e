"""LoRA adapters in PEFT's layout: ``adapter_config.json`` and ``adapter_model.safetensors``.

An adapter is data from a stranger, as a model is: the configuration is plain JSON, the tensors are checked against the
header, and ``adapter_model.bin``, a pickle, is refused. A key of the configuration that changes the result and is not
modeled here is refused by name, and so is an unknown key with a value.

The tensors of the file are updates (LoRA, arXiv 2106.09685; rank-stabilized scale, arXiv 2312.03732; DoRA, arXiv
2402.09353) and whole parameters (``modules_to_save``, biases). ``capture.adapters`` merges both into a model.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optkit.checkpoint.tensors import load_tensors
from optkit.checkpoint.validate import MAX_JSON_BYTES, PICKLE_SUFFIXES, regular_files
from optkit.errors import UserError
from optkit.machine.checksums import sha256_file
from optkit.untrusted_json import parse_json, read_bounded

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
# Read here, or of no effect on a merge: how the adapter was trained, and where.
KNOWN = {
    "peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "init_lora_weights",
    "base_model_name_or_path", "revision", "task_type", "inference_mode", "lora_dropout", "bias", "modules_to_save",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out", "auto_mapping",
    "peft_version", "megatron_core", "runtime_config", "ephemeral_gpu_offload", "eva_config", "qalora_group_size",
}  # fmt: skip
# Starts that change the base model when the adapter is loaded, so the file alone does not have the update.
CHANGES_BASE = ("pissa", "olora", "loftq", "corda")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LITERAL = re.compile(r"\^?(?:[\w-]|\\?\.)+\$?", re.ASCII)
SUFFIXES = {
    "lora_A.weight": "a", "lora_B.weight": "b", "lora_embedding_A": "a", "lora_embedding_B": "b",
    "lora_magnitude_vector": "magnitude", "lora_magnitude_vector.weight": "magnitude",
}  # fmt: skip


@dataclass(frozen=True)
class Update:
    """The change of one weight W [N, K]: ``scale * b @ a``, then with ``magnitude`` rows scaled to that norm.

    Attributes:
        a: [r, K]; b: [N, r]; magnitude: [N] (DoRA), or None.
    """

    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None = None


@dataclass(frozen=True)
class Adapter:
    """An adapter on the local machine, checked.

    Attributes:
        name: of the directory.
        digest: sha256 over both files.
        base: the base model's name as written by PEFT; empty where there is none.
        updates: by module of the base model.
        saved: whole parameters, by name in the base model.
        summary: rank and scale in words.
    """

    name: str
    directory: Path
    digest: str
    base: str
    updates: Mapping[str, Update]
    saved: Mapping[str, Tensor]
    summary: str


def read_adapter(directory: Path) -> Adapter:
    """Read and check the adapter in ``directory``.

    Raises:
        UserError: no adapter, a pickle, an unsupported kind, or tensors that do not fit each other.
    """
    directory = directory.expanduser().resolve()
    check_files(directory)
    config = parse_json(read_bounded(directory / CONFIG, MAX_JSON_BYTES), str(directory / CONFIG))
    check_config(config, str(directory / CONFIG))
    tensors = load_tensors(directory / WEIGHTS)
    updates, saved = split(tensors, config, str(directory / WEIGHTS))
    digest = hashlib.sha256("".join(sha256_file(directory / name) for name in (CONFIG, WEIGHTS)).encode())
    kinds = [name for key, name in (("use_rslora", "rsLoRA"), ("use_dora", "DoRA")) if config.get(key)]
    summary = ", ".join([*kinds, f"rank {config['r']}", f"alpha {config['lora_alpha']:g}"])
    base = config.get("base_model_name_or_path")
    return Adapter(
        directory.name,
        directory,
        digest.hexdigest(),
        base if isinstance(base, str) else "",
        updates,
        saved,
        summary,
    )


def check_files(directory: Path) -> None:
    """Check that both files are there, and no pickle in place of the second.

    Raises:
        UserError: a file is missing or a pickle.
    """
    names = regular_files(directory) if directory.is_dir() else set()
    if CONFIG not in names:
        raise UserError(f"there is no {CONFIG}, so this is no adapter", where=str(directory))
    if WEIGHTS in names:
        return
    pickles = sorted(name for name in names if Path(name).suffix in PICKLE_SUFFIXES)
    if pickles:
        raise UserError(
            "this is a pickle file, which can run code when loaded; optkit reads only safetensors",
            where=str(directory / pickles[0]),
            fix="save the adapter again in a sandbox: PeftModel.save_pretrained(OUT) writes safetensors",
        )
    raise UserError(f"there is no {WEIGHTS}", where=str(directory))


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Refuse kinds of adapters, and settings, whose merge is not that of this module.

    Raises:
        UserError: a setting that is not modeled, or has a wrong type.
    """
    if config.get("peft_type") != "LORA":
        raise UserError(
            f"the adapter is of type {config.get('peft_type')!r:.40}, optkit merges LORA", where=where
        )
    unknown = sorted(key for key, value in config.items() if value and key not in KNOWN)
    if unknown:
        what = f"'{unknown[0]:.60}' is set, and optkit does not know what it does to the weights"
        raise UserError(
            what, where=where, fix="merge it with peft (merge_and_unload) and give the merged model"
        )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        what = f"its start ('{start:.40}') changes the base model, so the adapter alone is not the update"
        fix = "save it with path_initial_model_for_weight_conversion, which makes it a plain LoRA"
        raise UserError(what, where=where, fix=fix)
    for key in ("r", "lora_alpha"):
        is_number(config.get(key), f"'{key}'", where)
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(key) or {}
        if not isinstance(pattern, dict):
            raise UserError(f"'{key}' must be a table", where=where)
        for name, value in pattern.items():
            is_number(value, f"'{key}' of {name!r:.60}", where)
            if not LITERAL.fullmatch(name):
                raise UserError(
                    f"'{key}' has the pattern {name!r:.60}; optkit reads names of modules", where=where
                )


def is_number(value: Any, name: str, where: str) -> None:
    if type(value) not in (int, float) or not 0 < value < 1e6:
        raise UserError(f"{name} must be a positive number, got {value!r:.40}", where=where)


# -- tensors ---------------------------------------------------------------------------------------------


def split(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], where: str
) -> tuple[dict[str, Update], dict[str, Tensor]]:
    """The updates by module, and the whole parameters by name.

    Raises:
        UserError: no tensors, a name of another form, two tensors or half an update for a weight, or shapes that
            contradict each other.
    """
    if not tensors:
        raise UserError("there is no tensor in it", where=where)
    parts: dict[str, dict[str, Tensor]] = {}
    saved: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        check_tensor(name, tensor, where)
        module, key = placed(name.removeprefix(PREFIX))
        if key is None and "lora_" not in name:
            parameter = module.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
            if parameter in saved:
                raise UserError(f"{parameter!r:.100} is replaced by two tensors", where=where)
            saved[parameter] = tensor
        elif key is None or key in parts.setdefault(module, {}):
            raise UserError(f"the tensor {name!r:.100} is of no kind that optkit merges", where=where)
        else:
            parts[module][key] = tensor
    return {module: update_of(module, found, config, where) for module, found in parts.items()}, saved


def placed(name: str) -> tuple[str, str | None]:
    """The module and the part of an update that a tensor is; the name and None for a whole parameter."""
    for suffix, key in SUFFIXES.items():
        if name.endswith(f".{suffix}"):
            return name.removesuffix(f".{suffix}"), key
    return name, None


def check_tensor(name: str, tensor: Tensor, where: str) -> None:
    if not name.startswith(PREFIX):
        raise UserError(f"the tensor {name!r:.100} does not begin with {PREFIX}", where=where)
    if tensor.dtype not in FLOATS or not bool(tensor.isfinite().all()):
        raise UserError(f"the tensor {name!r:.100} holds no finite floats of 16 to 64 bits", where=where)


def update_of(module: str, found: Mapping[str, Tensor], config: Mapping[str, Any], where: str) -> Update:
    """The update of ``module`` from its tensors, with the scale of PEFT: alpha / r, or alpha / sqrt(r) (rsLoRA).

    Raises:
        UserError: a tensor is missing, or the shapes contradict the rank or each other.
    """
    a, b, magnitude = (found.get(key) for key in ("a", "b", "magnitude"))
    if a is None or b is None or (magnitude is None) == bool(config.get("use_dora")):
        raise UserError(f"the update of {module:.100} lacks a tensor", where=where)
    rank = by_name(config.get("rank_pattern"), module, config["r"])
    rows = None if magnitude is None else magnitude.numel()
    if (
        a.ndim != 2
        or b.ndim != 2
        or a.shape[0] != rank
        or b.shape[1] != rank
        or rows not in (None, b.shape[0])
    ):
        shapes = f"{list(a.shape)} and {list(b.shape)}"
        raise UserError(f"the update of {module:.100} is {shapes}, its rank is {rank}", where=where)
    alpha = by_name(config.get("alpha_pattern"), module, config["lora_alpha"])
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Update(a, b, scale, None if magnitude is None else magnitude.flatten())


def by_name(pattern: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first name in ``pattern`` that is ``module`` or the end of its path."""
    for name, value in (pattern or {}).items():
        plain = name.removesuffix("$").replace("\\.", ".")
        whole = plain.startswith("^")
        plain = plain.removeprefix("^")
        if module == plain or (not whole and module.endswith(f".{plain}")):
            return value
    return default
