"""A GGUF file becomes a Hugging Face directory, tensor by tensor.

Configuration, tokenizer and names of tensors follow transformers' GGUF integration. Values are those of the ``gguf``
package, the reference of the format: a block's scale times its codes has more significant bits than 16-bit floats
have, so quantized tensors are written as float32, bigger on disk and exact; float16 and bfloat16 tensors keep their
type where the values fit.

One tensor is dequantized at a time and shards are written as they fill, so the memory is that of a shard. Architectures
whose tensors do not map one to one (experts stacked from several, hybrid models) are loaded whole by transformers.

Every parameter of the model must be in the file: a tensor that neither side names is an error, never a random value.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from optkit.checkpoint.validate import BOUNDS
from optkit.errors import UserError, refusal
from optkit.extras import need_extra

SHARD_BYTES = 1 << 30
NOTE_FILE = "optkit_source.json"
ANOTHER = "download or copy it again, or take another file of the model"
# int8 and w4a8 with groups of 32 have the block's own levels.
KEPT = {"Q8_0": "int8", "Q4_0": "w4a8 (symmetric)", "Q4_1": "w4a8", "Q4_K": "w4a8"}
NARROW = {"F16": "float16", "BF16": "bfloat16"}
# Sizes of an architecture, and the keys of config.json with the same bounds.
SIZES = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads", "head_count_kv": "num_key_value_heads", "vocab_size": "vocab_size",
    "key_length": "head_dim", "value_length": "head_dim", "context_length": "max_position_embeddings",
    "expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip

NEVER_ZERO = ("block_count", "embedding_length", "head_count", "vocab_size", "context_length")
TOKENIZER_KEY = "tokenizer.ggml.model"


class Stacked(Exception):
    """The file has tensors that only transformers' own loader puts together."""


def convert(file: Path, digest: str, temporary: Path, written: Path) -> None:
    """Write the Hugging Face form of ``file`` to ``written``, with an empty folder ``temporary`` for links.

    Raises:
        UserError: a damaged file, an architecture or a block type that is not supported, or a missing tensor.
    """
    need_extra("formats", "reading GGUF")
    from transformers import AutoTokenizer

    alone = temporary / "gguf"  # transformers reads the GGUF from a directory with no other file
    alone.mkdir()
    (alone / "model.gguf").symlink_to(file.resolve())
    source = {"gguf_file": "model.gguf", "local_files_only": True}
    try:
        with read_once():
            refuse_version(file)
            refuse_cut(file)
            kinds = checked_blocks(file)
            tokenizer = AutoTokenizer.from_pretrained(alone, **source)
            try:
                write_streamed(alone, source, written)
            except Stacked:
                write_whole(alone, source, written)
    except Exception as error:  # the readers raise what numpy, struct, torch and Rust raise on what they meet
        if isinstance(error, UserError):
            raise
        refused = refusal(error)
        unknown = "architecture" in str(error) and "not supported" in str(error)
        fix = "a GGUF of an architecture that transformers reads is needed" if unknown else ANOTHER
        what = f"cannot convert this GGUF: {' '.join(str(error).split())[:300] or type(error).__name__}"
        raise refused or UserError(what, where=str(file), fix=fix) from error
    for argument in ("local_files_only", "is_local"):  # about this load, not about the tokenizer
        tokenizer.init_kwargs.pop(argument, None)
    tokenizer.save_pretrained(written)
    note = {"converted_from": file.name, "sha256": digest, "dtype": "float32", "blocks": kinds}
    (written / NOTE_FILE).write_text(json.dumps(note, indent=2) + "\n")


@contextmanager
def read_once() -> Iterator[None]:
    """Have files parsed once inside the block, and tables of names made once.

    transformers parses the file for the configuration and again for the tokenizer, 2 seconds each with a vocabulary of
    49,000 tokens, and asks for the table of names at every module of the model.
    """
    need_extra("formats", "reading GGUF")
    import gguf

    library: Any = gguf  # names of a typed module, which are put back
    before = library.GGUFReader, library.get_tensor_name_map
    parsed, table = map(cache, before)
    library.GGUFReader = lambda path, mode="r": parsed(Path(path).resolve(), mode)
    library.get_tensor_name_map = table
    try:
        yield
    finally:
        library.GGUFReader, library.get_tensor_name_map = before


def note_of(directory: Path) -> str:
    """A sentence on the blocks of the GGUF behind a converted ``directory``, and on what keeps their values."""
    kinds: Mapping[str, int] = json.loads((directory / NOTE_FILE).read_text("utf-8")).get("blocks", {})
    counts = ", ".join(
        f"{kind} ({count})" for kind, count in sorted(kinds.items(), key=lambda item: -item[1])
    )
    kept = [f"{kind} by {KEPT[kind]}" for kind in sorted(kinds) if kind in KEPT]
    lost = [kind for kind in sorted(kinds) if kind not in KEPT and kind not in ("F32", "F16", "BF16")]
    parts = [f"GGUF with tensors of {counts or 'unknown types'}, converted without loss"]
    if kept:
        parts.append(f"groups of 32 keep the levels of {', '.join(kept)}")
    if lost:
        parts.append(f"every quantizing pass rounds {', '.join(lost)} anew")
    return "; ".join(parts)


def refuse_version(file: Path) -> None:
    """Refuse a version of the format unknown to the ``gguf`` package.

    Raises:
        UserError: with the known versions.
    """
    need_extra("formats", "reading GGUF")
    from gguf.gguf_reader import READER_SUPPORTED_VERSIONS

    with file.open("rb") as stream:
        field = stream.read(8)[4:]
    version = min(int.from_bytes(field, "little"), int.from_bytes(field, "big"))  # of either order of bytes
    if len(field) == 4 and version not in READER_SUPPORTED_VERSIONS:
        known = " or ".join(map(str, READER_SUPPORTED_VERSIONS))
        what = f"cannot convert this GGUF: it is of version {version} of the format"
        raise UserError(what, where=str(file), fix=f"take a file of version {known}")


def refuse_cut(file: Path) -> None:
    """Refuse a file whose end is missing, as a download that broke off leaves it.

    Raises:
        UserError: the header or a tensor goes on behind the end of the file.
    """
    need_extra("formats", "reading GGUF")
    from gguf import GGUFReader

    try:
        GGUFReader(file)
    except (IndexError, ValueError) as error:  # of numpy, about slices behind the end
        if any(words in str(error) for words in ("reshape", "out of bounds", "larger dtype")):
            raise UserError(
                f"the file is damaged, or its end is missing: {' '.join(str(error).split())[:200]}",
                where=str(file),
                fix="download or copy it again",
            ) from error
        raise


def checked_blocks(file: Path) -> dict[str, int]:
    """The number of tensors of each block type, after a check of the sizes that the file states.

    Raises:
        ValueError: a size beyond any real model, which would take memory without end, or zero.
        UserError: there is no tokenizer.
    """
    need_extra("formats", "reading GGUF")
    from gguf import GGUFReader

    reader = GGUFReader(file)
    for name, field in reader.fields.items():
        key = name.rpartition(".")[2]
        bound, content = BOUNDS[SIZES[key]] if key in SIZES else 0, field.contents()
        least = int(key in NEVER_ZERO and not isinstance(content, list))  # some layers may have no heads
        for value in as_list(content) if bound else ():
            if type(value) is not int or not least <= value <= bound:
                raise ValueError(
                    f"'{name:.80}' must be an integer from {least} to {bound}, got {value!r:.40}"
                )
    if TOKENIZER_KEY not in reader.fields:
        raise UserError(
            f"cannot convert this GGUF: it has no tokenizer (the key '{TOKENIZER_KEY}')",
            where=str(file),
            fix="take a file with a tokenizer, or the Hugging Face directory of the model",
        )
    return dict(Counter(tensor.tensor_type.name for tensor in reader.tensors))


def as_list(value: Any) -> list[Any]:
    """``value``, a number or one for each layer, as a list."""
    return value if isinstance(value, list) else [value]


# -- tensor by tensor ------------------------------------------------------------------------------------


def write_streamed(alone: Path, source: Mapping[str, Any], written: Path) -> None:
    """Write configuration and tensors to ``written``, from one pass over the file.

    Raises:
        Stacked: the architecture needs transformers' own loader.
        ValueError: the file lacks a parameter of the model, or has another shape.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(alone, **source)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = "float32"
    written.mkdir()
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    tied = set(model.all_tied_weights_keys)
    found = write_shards(checked(tensors_of(alone / "model.gguf", model), wanted), written)
    missing = sorted(set(wanted) - found - tied)
    if missing:
        raise ValueError(f"it has no tensor for {missing[0]}")
    model.config.save_pretrained(written)
    GenerationConfig.from_model_config(model.config).save_pretrained(written)


def tensors_of(file: Path, model: Any) -> Iterator[tuple[str, Any]]:
    """Names in ``model`` and values of the tensors of ``file``, by the maps of transformers."""
    need_extra("formats", "reading GGUF")
    import numpy as np
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
        read_field,
    )

    reader = GGUFReader(file)
    architecture = read_field(reader, "general.architecture")[0]
    kind = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    if not maps_one_to_one(architecture, kind):
        raise Stacked
    processor = kind(config=model.config.to_dict())
    names = get_gguf_hf_weights_map(model, processor)
    for tensor in reader.tensors:
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        done = processor.process(
            weights=values, name=tensor.name, tensor_key_mapping=names, parsed_parameters={}
        )
        if done.name in names:
            value = torch.from_numpy(np.ascontiguousarray(done.weights))
            yield names[done.name], narrowed(value, NARROW.get(tensor.tensor_type.name))


def maps_one_to_one(architecture: str, processor: Any) -> bool:
    """True where each tensor of the file is a parameter of the model: no stacked experts, no hybrid layers."""
    if hasattr(processor, "_set_moe_expert_tensor") or hasattr(processor, "_split_moe_expert_tensor"):
        return False
    try:
        from transformers.integrations.gguf.utils import is_gguf_arch_supported
    except ImportError:  # of releases before the loader of hybrid models
        return True
    return not is_gguf_arch_supported(architecture)


def narrowed(value: Any, dtype: str | None) -> Any:
    """``value`` in the type of the file where that is exact, else as it is."""
    import torch

    narrow = value if dtype is None else value.to(getattr(torch, dtype))
    return narrow if torch.equal(narrow.to(value.dtype), value) else value


def checked(
    tensors: Iterator[tuple[str, Any]], wanted: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Any]]:
    """``tensors`` with the shapes of ``wanted``, each once.

    Raises:
        ValueError: a tensor of another shape, or twice.
    """
    seen = set[str]()
    for name, value in tensors:
        if tuple(value.shape) != wanted.get(name) or name in seen:
            raise ValueError(f"{name} is {list(value.shape)}, its model has {list(wanted.get(name, ()))}")
        seen.add(name)
        yield name, value


def write_shards(tensors: Iterator[tuple[str, Any]], directory: Path) -> set[str]:
    """Write ``tensors`` as safetensors of about ``SHARD_BYTES``, with an index for several; gives their names."""
    from safetensors.torch import save_file

    shards: list[set[str]] = []
    waiting: dict[str, Any] = {}
    total = 0

    def write() -> None:
        save_file(waiting, directory / f"{len(shards)}.part", metadata={"format": "pt"})
        shards.append(set(waiting))
        waiting.clear()

    for name, value in tensors:
        waiting[name] = value
        total += value.nbytes
        if sum(tensor.nbytes for tensor in waiting.values()) >= SHARD_BYTES:
            write()
    if waiting:
        write()
    name_shards(directory, shards, total)
    return set().union(*shards)


def name_shards(directory: Path, shards: list[set[str]], total: int) -> None:
    """Give the written parts the names of the format."""
    placed: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        file = "model.safetensors" if len(shards) == 1 else file
        (directory / f"{number}.part").rename(directory / file)
        placed |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


# -- as a whole ------------------------------------------------------------------------------------------


def write_whole(alone: Path, source: Mapping[str, Any], written: Path) -> None:
    """Write the model that transformers loads from the GGUF, in the memory of the float32 model.

    Raises:
        ValueError: the file lacks a parameter of the model.
    """
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        alone,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
        **source,
    )
    model, report = loaded
    if report["missing_keys"]:
        raise ValueError(f"it has no tensor for {min(report['missing_keys'])}")
    model.save_pretrained(written)
