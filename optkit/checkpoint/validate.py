"""Checks a Hugging Face directory before any library reads a file.

A model directory is data from a stranger. Libraries downstream obey the data: a class to import (``auto_map``), a file
to open (the shard index), a size to allocate (config and headers). So the directory is read here first, with plain JSON
and integers, and refused in one line when the directory could

- run code: ``auto_map``, ``trust_remote_code``, an attention kernel by Hub name, pickle weights (``.bin``,
  ``.pt``, ``.pth``, ``.ckpt``, ``.pkl``, by name and by content);
- reach outside: shard names with separators, symlinks out of the directory (links into the Hugging Face cache, made
  by the Hub client, are allowed), pipes and devices;
- exhaust memory: config integers beyond any real model, headers that contradict the file's size.

The trade-off: a directory with both safetensors and pickle weights is refused as well, since a library may pick either;
the message asks the user to delete the pickle.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optkit.checkpoint.safetensors_header import TensorInfo, read_header
from optkit.errors import UnsupportedModel, UserError
from optkit.untrusted_json import parse_json, read_bounded

__all__ = ["CheckpointInfo", "TensorInfo", "validate_checkpoint"]

SAFE_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)
PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
MAX_JSON_BYTES = 25 * 1000**2
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
CODES = Path("optkit", "packed.safetensors")  # of an artifact: may hold all its weights
VOCABULARY_FILES = {"tokenizer.json", "vocab.json", "added_tokens.json", "special_tokens_map.json", INDEX}

_LAYERS, _WIDTH, _VOCABULARY, _LENGTH = 1024, 65536, 1 << 21, 1 << 24
BOUNDS = {
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers"], _LAYERS),
    **dict.fromkeys(
        ["hidden_size", "n_embd", "d_model", "num_attention_heads", "n_head", "head_dim"], _WIDTH
    ),
    **dict.fromkeys(["num_key_value_heads", "num_experts", "num_local_experts"], _WIDTH),
    **dict.fromkeys(["intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size"], 16 * _WIDTH),
    **dict.fromkeys(["vocab_size"], _VOCABULARY),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx"], _LENGTH),
}
# A prompt and an answer of a token each.
LEAST = dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx"], 2)


@dataclass(frozen=True)
class CheckpointInfo:
    """The content of a valid checkpoint.

    Attributes:
        config: ``config.json``.
        tensors: every weight, by name.
    """

    config: dict[str, Any]
    tensors: dict[str, TensorInfo]


def validate_checkpoint(directory: Path, *, weights: bool = True) -> CheckpointInfo:
    """Check ``directory`` and return its config and tensor table; reads no weights.

    ``weights=False`` accepts a directory with a config alone: enough for a plan.

    Raises:
        UserError: an invalid checkpoint; the message has the file and a fix.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError("no such directory", where=str(directory))
    names = _check_files(directory)
    if "config.json" not in names:
        raise UserError(
            "no config.json, so not a Hugging Face model",
            where=str(directory),
            fix="give the directory of a model",
        )
    for name in sorted(names):
        if name.endswith(".json") and name not in VOCABULARY_FILES:
            _check_json(directory / name)
    config = _read_json(directory / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise UserError("the key 'model_type' is missing", where=str(directory / "config.json"))
    planned = not weights and not {INDEX, SINGLE} & names
    return CheckpointInfo(config, {} if planned else _read_tensors(directory, names))


# -- files ------------------------------------------------------------------------------------------


def _check_files(directory: Path) -> set[str]:
    """Names of the regular files at the top of ``directory``; refuses what must not be there."""
    names = regular_files(directory)
    pickles = sorted(name for name in names if Path(name).suffix.lower() in PICKLE_SUFFIXES)
    if pickles:
        raise UserError(
            "this is a pickle file, which can run code when loaded; optkit reads only safetensors",
            where=str(directory / pickles[0]),
            fix="delete it if there are safetensors too, else convert it in a sandbox: AutoModelForCausalLM"
            ".from_pretrained(DIR).save_pretrained(OUT) writes safetensors",
        )
    if "adapter_config.json" in names:
        raise UserError(
            "this is an adapter, not a model",
            where=str(directory),
            fix="give its base model, and this directory as --adapter",
        )
    return names


def regular_files(directory: Path) -> set[str]:
    """Names of the regular files at the top of ``directory``.

    Raises:
        UserError: a symlink that leaves the directory, or a pipe, socket or device.
    """
    roots = _allowed_roots(directory)
    return {entry.name for entry in sorted(directory.iterdir()) if _is_regular(entry, roots)}


def _allowed_roots(directory: Path) -> list[Path]:
    """Allowed targets of symlinks: the directory, the Hub cache, the blobs of a Hub snapshot."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    roots = [directory, Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")]
    real = directory.resolve()
    if real.parent.name == "snapshots":
        roots.append(real.parent.parent / "blobs")
    return [root.resolve() for root in roots]


def _is_regular(entry: Path, roots: list[Path]) -> bool:
    """True for a regular file, False for a directory; anything else is refused."""
    try:
        if entry.is_symlink():
            target = entry.resolve(strict=True)
            if not any(target.is_relative_to(root) for root in roots):
                raise UserError("a symlink that leaves the model directory", where=str(entry))
        mode = entry.stat().st_mode
    except (OSError, RuntimeError) as error:
        raise UserError("a broken symlink or unreadable file", where=str(entry)) from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise UserError("not a regular file (a pipe, socket or device)", where=str(entry))
    return stat.S_ISREG(mode)


# -- JSON -------------------------------------------------------------------------------------------


def _read_json(file: Path) -> dict[str, Any]:
    return parse_json(read_bounded(file, MAX_JSON_BYTES), str(file))


def _check_json(file: Path) -> None:
    """Refuse code references and absurd sizes anywhere in ``file``."""
    for key, value in entries(_read_json(file)):
        if key == "auto_map" or (key == "trust_remote_code" and value):
            what = f"'{key}' asks to run Python code that comes with the model; optkit never does"
            raise UnsupportedModel(what, where=str(file), fix="use a model that transformers itself supports")
        if "attn_implementation" in key and isinstance(value, str) and "/" in value:
            raise UnsupportedModel(f"'{key}' asks to fetch a kernel from the Hub", where=str(file))
        if key == "transformers_weights":
            raise UserError(
                "'transformers_weights' names another weights file", where=str(file), fix=f"use {SINGLE}"
            )
        if key in BOUNDS:
            _check_bound(key, value, LEAST.get(key, 0), BOUNDS[key], file)


def _check_bound(key: str, value: Any, least: int, limit: int, file: Path) -> None:
    """Check that ``value`` is null, an integer from ``least`` to ``limit``, or a list of integers of the range."""
    for number in value if isinstance(value, list) else [value]:
        if number is not None and (type(number) is not int or not least <= number <= limit):
            what = f"'{key}' must be an integer from {least} to {limit}, got {number!r:.40}"
            raise UserError(what, where=str(file))


def entries(root: Any) -> Iterator[tuple[str, Any]]:
    """Every key and value at any depth, without recursion."""
    pending = [root]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            yield from node.items()
            pending.extend(node.values())
        elif isinstance(node, list):
            pending.extend(node)


# -- weights ----------------------------------------------------------------------------------------


def _read_tensors(directory: Path, names: set[str]) -> dict[str, TensorInfo]:
    if INDEX in names and SINGLE in names:
        raise UserError(f"there is both {SINGLE} and {INDEX}", where=str(directory), fix="keep one of them")
    if INDEX in names:
        return _read_sharded(directory, names)
    if SINGLE in names:
        return _read_shard(directory / SINGLE)
    fix = f"it needs {SINGLE}, or {INDEX} and its shards"
    if (directory / CODES).is_file():
        fix = f"optkit export {directory} --format hf --out DIR writes the float weights of this artifact"
    raise UserError("there is a config but no weights", where=str(directory), fix=fix)


def _read_shard(file: Path) -> dict[str, TensorInfo]:
    with file.open("rb") as stream:
        start = stream.read(2)
    if start in (b"PK", b"\x80\x02", b"\x80\x04"):  # zip archive of torch.save, pickle protocols 2 and 4
        raise UserError("a pickle file under a safetensors name", where=str(file))
    return read_header(file)


def _read_sharded(directory: Path, names: set[str]) -> dict[str, TensorInfo]:
    """Tensors of all shards; index and shards must agree on which tensor lies where."""
    index = directory / INDEX
    mapping = _read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise UserError("the key 'weight_map' is missing or empty", where=str(index))
    for shard in mapping.values():
        _check_shard_name(shard, names, index)
    tensors: dict[str, TensorInfo] = {}
    for shard in sorted(set(mapping.values())):
        for name, info in _read_shard(directory / shard).items():
            if mapping.get(name) != shard:
                raise UserError(f"tensor {name!r:.100} is in {shard} but not listed there", where=str(index))
            tensors[name] = info
    missing = sorted(set(mapping) - set(tensors))
    if missing:
        raise UserError(f"tensor {missing[0]!r:.100} is not in {mapping[missing[0]]}", where=str(index))
    return tensors


def _check_shard_name(shard: Any, names: set[str], index: Path) -> None:
    if not isinstance(shard, str) or not SAFE_NAME.fullmatch(shard) or not shard.endswith(".safetensors"):
        what = f"{shard!r:.80} is not a shard's file name"
        raise UserError(what, where=str(index), fix="use letters, digits, '.', '_' and '-', no folders")
    if shard not in names:
        raise UserError(f"the shard {shard} is missing", where=str(index), fix="download or copy it again")
