"""GGUF files become the tensors that transformers' loader gives, with values of a second dequantization."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("gguf")

from optkit.checkpoint import gguf
from optkit.checkpoint.locate import resolve
from optkit.checkpoint.validate import validate_checkpoint
from optkit.errors import UserError
from tests.support.gguf_files import SCALES, random_blocks, write_gguf

SOURCE = {"gguf_file": "model.gguf", "local_files_only": True}
UP, Q = "model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight"


def streamed(directory: Path, architecture: str, kind: str) -> dict[str, torch.Tensor]:
    write_gguf(directory / "model.gguf", architecture, kind)
    gguf.write_streamed(directory, SOURCE, directory / "out")
    return load_file(directory / "out" / "model.safetensors")


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_streamed_tensors_are_those_of_transformers_own_loader(architecture: str, tmp_path: Path) -> None:
    given = streamed(tmp_path, architecture, "Q4_K")
    gguf.write_whole(tmp_path, SOURCE, tmp_path / "whole")
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    assert set(given) == set(expected) and all(torch.equal(given[name], expected[name]) for name in given)
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("out", "whole")]
    for config in configs:
        config.pop("quantization_config", None)
    assert configs[0] == configs[1]
    assert set(validate_checkpoint(tmp_path / "out").tensors) == set(given)


@pytest.mark.parametrize("kind", sorted(set(SCALES) - {"Q5_0", "Q5_1"}))
def test_streamed_values_are_those_of_a_second_dequantization(kind: str, tmp_path: Path) -> None:
    """The other side is torch code of transformers, written apart from the ``gguf`` package."""
    second = pytest.importorskip("transformers.integrations.gguf.dequant")
    types = {name: number for number, name in second.GGML_NAME.items()}
    stored = write_gguf(tmp_path / "model.gguf", "qwen3", kind)["blk.0.ffn_up.weight"]
    gguf.write_streamed(tmp_path, SOURCE, tmp_path / "out")
    given = load_file(tmp_path / "out" / "model.safetensors")[UP]
    expected = second.dequantize(torch.from_numpy(stored.reshape(-1).copy()), types[kind]).view(given.shape)
    assert given.dtype == torch.float32
    torch.testing.assert_close(given, expected, atol=0, rtol=3e-7)  # the order of two products


@pytest.mark.parametrize(("kind", "minimum"), [("Q5_0", False), ("Q5_1", True)])
def test_streamed_values_are_those_of_the_format_when_codes_have_five_bits(
    kind: str, minimum: bool, tmp_path: Path
) -> None:
    stored = write_gguf(tmp_path / "model.gguf", "qwen3", kind)["blk.0.ffn_up.weight"]
    gguf.write_streamed(tmp_path, SOURCE, tmp_path / "out")
    given = load_file(tmp_path / "out" / "model.safetensors")[UP]
    blocks = stored.reshape(-1, stored.shape[1] // (given.shape[1] // 32))
    start = 4 if minimum else 2
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float64)
    low = blocks[:, 2:4].copy().view(np.float16).astype(np.float64) if minimum else -16 * scale
    fifth = np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little").astype(np.int64)
    nibbles = blocks[:, start + 4 :]
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=1) + 16 * fifth
    expected = torch.from_numpy(scale * codes + low).view(given.shape)
    torch.testing.assert_close(given.double(), expected, atol=1e-7, rtol=1e-6)


def test_streamed_shards_are_written_as_they_fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "SHARD_BYTES", 1 << 19)
    write_gguf(tmp_path / "model.gguf", "llama", "Q8_0")
    gguf.write_streamed(tmp_path, SOURCE, tmp_path / "out")
    info = validate_checkpoint(tmp_path / "out")
    files = sorted({tensor.file.name for tensor in info.tensors.values()})
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert info.tensors[UP].shape == (512, 256) and not list((tmp_path / "out").glob("*.part"))


def test_read_once_parses_a_file_once_and_leaves_the_library_as_it_was(tmp_path: Path) -> None:
    import gguf as library

    before, file = library.GGUFReader, tmp_path / "model.gguf"
    write_gguf(file, "llama", "Q8_0")
    with gguf.read_once():
        assert library.GGUFReader(file) is library.GGUFReader(str(file))
        gguf.write_streamed(tmp_path, SOURCE, tmp_path / "once")
    assert library.GGUFReader is before
    gguf.write_streamed(tmp_path, SOURCE, tmp_path / "again")
    once, again = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("once", "again"))
    assert once == again


def test_streamed_file_without_a_tensor_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "qwen3", "Q8_0", leave_out="blk.0.attn_q_norm.weight")
    with pytest.raises(ValueError, match=r"no tensor for model\.layers\.0\.self_attn\.q_norm\.weight"):
        gguf.write_streamed(tmp_path, SOURCE, tmp_path / "out")
    with pytest.raises(ValueError, match=r"no tensor for model\.layers\.0\.self_attn\.q_norm\.weight"):
        gguf.write_whole(tmp_path, SOURCE, tmp_path / "whole")


def changed(data: bytes, key: str, offset: int, value: bytes) -> bytes:
    """``data`` with ``value`` at ``offset`` bytes after the name ``key``."""
    start = data.index(key.encode()) + len(key) + offset
    return data[:start] + value + data[start + len(value) :]


HUGE = (2**31 - 1).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:24], "its end is missing"),
        (lambda data: data[:-10], "its end is missing"),
        (lambda data: changed(data, "qwen3.block_count", 4, HUGE), "'qwen3.block_count' must be an integer"),
        (
            lambda data: changed(data, "qwen3.attention.head_count", 4, b"\0" * 4),
            "'qwen3.attention.head_count' must be an integer from 1 to 65536, got 0. download or copy it again",
        ),
        (
            lambda data: data[:4] + b"\x09" + data[5:],
            "version 9 of the format. take a file of version 2 or 3",
        ),
        (lambda data: data, "it has no tokenizer (the key 'tokenizer.ggml.model'). take a file with"),
        (lambda data: changed(data, "qwen3.vocab_size", 4, HUGE), "'qwen3.vocab_size' must be an integer"),
        (lambda data: changed(data, "blk.0.ffn_up.weight", 0, HUGE), "size"),  # the number of dimensions
        (lambda data: changed(data, "blk.0.ffn_up.weight", 4, b"\xff" * 8), "multiple"),  # a dimension
        (lambda data: changed(data, "blk.0.ffn_up.weight", 20, b"\xff\0\0\0"), "255"),  # the block type
        (lambda data: changed(data, "blk.0.ffn_up.weight", 24, b"\xff" * 7 + b"\0"), "array"),  # the place
    ],
)
def test_damaged_file_is_refused_in_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes], reason: str
) -> None:
    monkeypatch.setenv("OPTKIT_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    write_gguf(file, "qwen3", "Q8_0")
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UserError, match=r"cannot convert this GGUF|is missing") as error:
        resolve(str(file))
    assert reason in str(error.value) and "\n" not in str(error.value)
    assert not list((tmp_path / "cache" / "models").iterdir())


def test_tensors_of_leaves_stacked_experts_to_transformers() -> None:
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS

    assert not gguf.maps_one_to_one("qwen3moe", TENSOR_PROCESSORS["qwen3moe"])
    assert gguf.maps_one_to_one("llama", TENSOR_PROCESSORS["llama"])


@pytest.mark.parametrize(
    ("values", "dtype", "kept"),
    [
        ([1.0, 0.5], "bfloat16", torch.bfloat16),
        ([1.0, 1.001], "bfloat16", torch.float32),
        ([1.0], None, torch.float32),
    ],
)
def test_narrowed_keeps_the_type_of_the_file_where_it_is_exact(
    values: list[float], dtype: str | None, kept: torch.dtype
) -> None:
    assert gguf.narrowed(torch.tensor(values), dtype).dtype == kept


def test_note_says_which_blocks_keep_their_levels(tmp_path: Path) -> None:
    note = {"blocks": {"Q4_K": 27, "Q6_K": 9, "F32": 3}}
    (tmp_path / gguf.NOTE_FILE).write_text(json.dumps(note))
    sentence = gguf.note_of(tmp_path)
    assert "Q4_K (27), Q6_K (9), F32 (3), converted without loss" in sentence
    assert "keep the levels of Q4_K by w4a8" in sentence and sentence.endswith("rounds Q6_K anew")


def float_blocks(kind: str) -> torch.Tensor:
    """A matrix [8, 256] of random blocks of ``kind``."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(random_blocks(kind, 8, 256, 3), GGMLQuantizationType[kind]))


@pytest.mark.parametrize(("kind", "symmetric"), [("Q4_0", True), ("Q4_1", False), ("Q4_K", False)])
def test_int4_groups_of_32_keep_the_levels_of_the_blocks(kind: str, symmetric: bool) -> None:
    from optkit.passes.quantization.int4_grid import quantize_int4

    weight = float_blocks(kind)
    stored = quantize_int4(weight, 32, symmetric)
    scale = stored.scale.float()[..., None]
    low = -8 * scale if stored.minimum is None else stored.minimum.float()[..., None]
    again = stored.codes.view(8, -1, 32) * scale + low
    assert ((again - weight.view(8, -1, 32)).abs() <= scale.abs() / 64).all()


def test_int8_groups_of_32_keep_the_levels_of_q8_0() -> None:
    """A block of a real file has a code of 127 or -127; -128 is not written by any quantizer."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    from optkit.passes.quantization.formats import quantize_weight

    values = np.random.default_rng(0).normal(size=(8, 256)).astype(np.float32)
    weight = torch.from_numpy(
        dequantize(quantize(values, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    )
    codes, scale = quantize_weight(weight, 32)
    steps = scale.float().view(8, -1, 1)
    again = codes.view(8, -1, 32) * steps
    assert ((again - weight.view(8, -1, 32)).abs() <= steps / 64).all()
