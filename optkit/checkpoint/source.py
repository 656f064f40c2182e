"""Opening of a checkpoint of any format, under the tensor names of graphs.

A float checkpoint gives the tensors of the files. In a quantized checkpoint the tensors of a quantized layer are
replaced by the layer's operands (``quantized_linear``), converted on reading: nothing is written to disk, and nothing
becomes float.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from optkit.checkpoint import awq, compressed, gptq, mxfp4, tensors
from optkit.checkpoint.quantized_linear import QuantizedLinear
from optkit.checkpoint.reading import Checked
from optkit.checkpoint.tensors import TensorFiles, float_bytes
from optkit.checkpoint.text_part import text_part
from optkit.checkpoint.validate import CheckpointInfo, validate_checkpoint
from optkit.errors import UnsupportedModel, UserError, nearest

FORMATS = {format.NAME: format for format in (gptq, awq, compressed)}


class Source(Mapping[str, Tensor]):
    """The tensors of a checked checkpoint directory, under the names of graphs. Memory-mapped, converted on reading.

    Attributes:
        info: the checkpoint on disk; of a multimodal checkpoint the text decoder.
        layers: the quantized layers, by module.
        float4: the tensors stored in MXFP4, which are read as floats.
        text: the text decoder of a multimodal checkpoint; None for a text model.
    """

    def __init__(self, directory: Path, info: CheckpointInfo) -> None:
        self.directory, self.text = directory, text_part(directory, info)
        self.info = info if self.text is None else self.text.info
        self.files = TensorFiles(directory, self.info, self.text.stored if self.text else None)
        self.float4 = float4_tensors(self.files)
        self.layers = {layer.name: layer for layer in quantized_layers(self.files)}
        operands: dict[str, QuantizedLinear | None] = {
            name: layer for layer in self.layers.values() for name in layer.names()
        }
        operands |= dict.fromkeys(self.float4)
        stored = {name for layer in self.layers.values() for name in layer.stored} | set(self.float4.stored)
        self._known: dict[str, QuantizedLinear | None] = dict.fromkeys(self.files.names() - stored) | operands

    def names(self) -> set[str]:
        return set(self._known)

    def __contains__(self, name: object) -> bool:
        return name in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def __getitem__(self, name: str) -> Tensor:
        layer = self._known.get(name)
        if name in self.float4:
            return self.float4[name]
        if layer is None:
            return self.files[name]
        return layer.operands[name.rpartition(".")[2]]


def open_source(directory: Path, *, weights: bool = True) -> Source:
    """The tensors of the checkpoint in ``directory``; with ``weights=False`` there may be none.

    Raises:
        UserError: a checkpoint of an unknown format, or with quantized layers in contradiction to the config.
    """
    return Source(directory, validate_checkpoint(directory, weights=weights))


def is_streamed(source: Source) -> bool:
    """True for a large float checkpoint: its weights stay on disk and are read at each use."""
    return not source.layers and not source.float4 and float_bytes(source.info) > tensors.STREAMED_BYTES


def quantized_layers(files: TensorFiles) -> list[QuantizedLinear]:
    """The quantized layers of a checkpoint; empty for a float checkpoint."""
    config = quantization_settings(files.info, files.directory)
    if config is None or config["quant_method"] == mxfp4.NAME:
        return []
    method = config["quant_method"]
    if method == compressed.NAME and compressed.is_float(config, str(files.directory)):
        return []
    if not files.info.tensors:
        raise UserError(
            "its config says that it is quantized, and how can only be seen from its weights",
            where=str(files.directory),
            fix="download the weights too",
        )
    layers = FORMATS[method].layers(config, Checked(files.directory, files.info.tensors, files))
    if not layers:
        what = f"the config says that it is quantized by {method}, and it has no quantized tensor"
        raise UserError(what, where=str(files.directory), fix="remove 'quantization_config' from config.json")
    return layers


def float4_tensors(files: TensorFiles) -> mxfp4.Float4Tensors:
    """The tensors of a checkpoint in MXFP4; none for other checkpoints."""
    config = quantization_settings(files.info, files.directory)
    is_float4 = config is not None and config["quant_method"] == mxfp4.NAME
    return mxfp4.Float4Tensors(Checked(files.directory, files.info.tensors if is_float4 else {}, files))


def quantization_settings(info: CheckpointInfo, directory: Path) -> dict[str, Any] | None:
    """``quantization_config`` of a checkpoint, of a known method; None for a float checkpoint."""
    config, where = info.config.get("quantization_config"), str(directory / "config.json")
    if config is None:
        return None
    if not isinstance(config, dict):
        raise UserError("'quantization_config' must be a table", where=where)
    method = config.get("quant_method")
    known = (*FORMATS, mxfp4.NAME)
    if not isinstance(method, str) or method not in known:
        fix = f"optkit reads {', '.join(known)}" if not isinstance(method, str) else nearest(method, known)
        raise UnsupportedModel(f"the checkpoint is quantized by {method!r:.40}", where=where, fix=fix)
    return config
