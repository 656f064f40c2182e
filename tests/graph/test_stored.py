"""Weights on disk: equal to the weights built in memory, without memory of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from optkit.graph.ir import Origin, Part, Weight
from optkit.graph.stored import Place, StoredPart, StoredTensor, stack_stored

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def stored(
    rows: list[int], dtype: torch.dtype, transposed: bool = False
) -> tuple[StoredTensor, torch.Tensor]:
    """A stored tensor of parts with ``rows`` rows, and the same in memory by ``Origin.build``."""
    values = {str(i): torch.randn(n, 3).to(dtype) for i, n in enumerate(rows)}
    parts = tuple(StoredPart.of(Place(None, name), lambda name=name: values[name]) for name in values)
    origin = Origin(tuple(Part(name, len(value)) for name, value in values.items()), transposed)
    return StoredTensor(parts, torch.float32, transposed), origin.build(values).to(torch.float32)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), DTYPES, st.booleans(), st.data())
def test_stored_tensor_has_the_values_built_in_memory(
    rows: list[int], dtype: torch.dtype, transposed: bool, data: st.DataObject
) -> None:
    given_, expected = stored(rows, dtype, transposed)
    value = given_.read()
    assert torch.equal(value, expected) and value.dtype == torch.float32 and value.is_contiguous()
    assert given_.shape == expected.shape and given_.nbytes == expected.nbytes
    start = data.draw(st.integers(0, len(expected) - 1))
    stop = data.draw(st.integers(start + 1, len(expected)))
    assert torch.equal(given_.rows(start, stop), expected[start:stop])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=3), DTYPES)
def test_stacked_weights_stay_on_disk_and_split_into_their_parts(
    groups: list[list[int]], dtype: torch.dtype
) -> None:
    made = [stored(rows, dtype) for rows in groups]
    stacked = stack_stored([one for one, _ in made])
    assert isinstance(stacked, StoredTensor)
    assert torch.equal(stacked.read(), torch.cat([value for _, value in made]))
    origin = Origin(tuple(Part(f"p{i}", part.shape[0]) for i, part in enumerate(stacked.parts)))
    whole = origin.split(stacked.read())
    for name, piece in Weight(stacked, origin).pieces().items():
        assert isinstance(piece, StoredTensor) and torch.equal(piece.read(), whole[name])


def test_weight_is_the_same_as_another_when_places_dtype_and_orientation_are() -> None:
    one, _ = stored([2, 3], torch.float32)
    assert Weight(one, None).is_same(Weight(StoredTensor(one.parts, torch.float32), None))
    assert not Weight(one, None).is_same(Weight(StoredTensor(one.parts[:1], torch.float32), None))
    assert not Weight(one, None).is_same(Weight(StoredTensor(one.parts, torch.float32, True), None))
    assert not Weight(one, None).is_same(Weight(one.read(), None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_tensor_is_not_resident_before_and_after_a_read(tmp_path: Path, dtype: torch.dtype) -> None:
    from optkit.machine.mapped_files import PageRelease

    size = 32 << 20
    save_file({"w": torch.ones(size // 1024, 1024 // dtype.itemsize).to(dtype)}, tmp_path / "a.safetensors")
    file, release = safe_open(str(tmp_path / "a.safetensors"), framework="pt"), PageRelease(tmp_path)
    part = StoredPart.of(Place(None, "w"), lambda: file.get_tensor("w"))
    weight = Weight(StoredTensor((part,), torch.float32, release=release), None)
    before = resident()
    assert weight.nbytes == 4 * weight.shape.numel() and resident() - before < 1 << 20
    assert float(weight.value.double().sum()) == weight.shape.numel()
    release(1 << 30)
    assert resident() - before < size // 4


def resident() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
