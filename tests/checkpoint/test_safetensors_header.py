"""Headers of safetensors files: read as the safetensors library reads them, and refused in one line where broken."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optkit.checkpoint.safetensors_header import MAX_HEADER_BYTES, read_header
from optkit.checkpoint.validate import SINGLE
from tests.checkpoint.test_validate import WEIGHT, anything, fuzz, numbers, outcome, refusal, shard
from tests.checkpoint.test_validate import model as model


def test_headers_agree_with_the_safetensors_library(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {
        "a": torch.zeros(3, 4),
        "b": torch.zeros(5, dtype=torch.bfloat16),
        "scalar": torch.tensor(1.0),
        "empty": torch.zeros(0, 7, dtype=torch.int8),
        "eight": torch.zeros(2, 2).to(torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = read_header(tmp_path / "x.safetensors")
    assert {name: info.shape for name, info in found.items()} == {
        k: tuple(v.shape) for k, v in tensors.items()
    }


def entry(**change: Any) -> dict[str, Any]:
    return {"w": WEIGHT["w"] | change}


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "cut off"),
        (b"\x05\x00", "cut off"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1), "25000000"),
        (struct.pack("<Q", 1 << 63), "25000000"),
        (struct.pack("<Q", 1000) + b"{}", "truncated"),
        (shard(data=bytes(20)), "truncated"),
        (shard(data=bytes(30)), "6 bytes follow"),
        (shard(b"[]"), "JSON object"),
        (shard(b"{'w'}"), "JSON"),
        (shard(b'{"w":1,"w":2}'), "duplicate"),
        (shard(entry(dtype="F31")), "dtype"),
        (shard(entry(shape=[-2, -3])), "shape"),
        (shard(entry(shape=[1 << 62, 1 << 62])), "shape"),
        (shard(entry(shape=[1 << 40, 1 << 40])), "shape"),
        (shard(entry(shape=[1 << 32, 1 << 32, 0])), "shape"),
        (shard(entry(shape=[2.0, 3])), "shape"),
        (shard(entry(shape=[True, 6])), "shape"),
        (shard(entry(data_offsets=[24, 0])), "data_offsets"),
        (shard(entry(data_offsets=[0])), "data_offsets"),
        (shard(entry(data_offsets=[4, 28]), bytes(28)), "gap"),
        (shard(WEIGHT | {"v": WEIGHT["w"]}), "overlaps"),
        (shard({"w": {"dtype": "F32"}}), "exactly"),
        (shard({"w": []}), "exactly"),
    ],
)
def test_broken_headers(model: Path, content: bytes, part: str) -> None:
    (model / SINGLE).write_bytes(content)
    assert part in refusal(model)


# -- fuzz -------------------------------------------------------------------------------------------

headers = st.dictionaries(
    st.text(max_size=6),
    anything
    | st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "I8", "F4", "F6_E2M3"]) | anything,
            "shape": st.lists(numbers, max_size=4) | anything,
            "data_offsets": st.lists(numbers, max_size=3) | anything,
        }
    ),
    max_size=4,
)


@fuzz
@given(headers, st.binary(max_size=40))
def test_fuzzed_headers(model: Path, header: Any, data: bytes) -> None:
    (model / SINGLE).write_bytes(shard(header, data))
    outcome(model)


@fuzz
@given(st.integers(0, 90), st.binary(max_size=9), st.integers(0, 9))
def test_mutated_files(model: Path, start: int, replacement: bytes, length: int) -> None:
    content = shard()
    (model / SINGLE).write_bytes(content[:start] + replacement + content[start + length :])
    outcome(model)
