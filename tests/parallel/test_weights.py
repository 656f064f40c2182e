"""Parts of weights: in memory and on disk the same values, and of a file no more than the part is read."""

from __future__ import annotations

import pytest
import torch

from optkit.graph.stored import Place, StoredPart, StoredTensor
from optkit.parallel.weights import Part, part_of

WHOLE = torch.arange(12 * 8, dtype=torch.float32).view(12, 8)
PARTS = [
    Part(0, ((4, 8),)),
    Part(0, ((0, 2), (6, 8), (10, 12))),
    Part(1, ((2, 6),)),
    Part(0, ((3, 9),), zeros=1),
]


def stored(transposed: bool = False) -> StoredTensor:
    value = WHOLE.T.contiguous() if transposed else WHOLE
    pieces = value.split([2, 3, value.shape[0] - 5]) if not transposed else (value,)
    parts = tuple(
        StoredPart.of(Place(None, str(i)), lambda piece=piece: piece) for i, piece in enumerate(pieces)
    )
    return StoredTensor(parts, torch.float32, transposed)


def expected(part: Part) -> torch.Tensor:
    index = torch.cat([torch.arange(a, b) for a, b in part.ranges])
    value = WHOLE.index_select(part.dim, index)
    return torch.cat([value, torch.zeros(part.zeros, 8)]) if part.zeros else value


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("of", ["memory", "disk", "transposed"])
def test_a_part_has_the_values_of_its_ranges(part: Part, of: str) -> None:
    source = WHOLE if of == "memory" else stored(of == "transposed")
    found = part_of(source, part)
    assert found.shape == expected(part).shape
    value = found.read() if isinstance(found, StoredTensor) else found
    assert torch.equal(value, expected(part)) and value.is_contiguous()


def test_a_part_on_disk_stays_there() -> None:
    for part in PARTS[:3]:
        assert isinstance(part_of(stored(), part), StoredTensor)
    places = {part_of(stored(), part).key for part in PARTS[:3]}  # type: ignore[union-attr]
    assert len(places) == 3


def test_rows_in_memory_are_not_copied() -> None:
    found = part_of(WHOLE, PARTS[0])
    assert isinstance(found, torch.Tensor) and found.data_ptr() == WHOLE[4:].data_ptr()
