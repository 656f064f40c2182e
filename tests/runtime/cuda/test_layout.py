"""The buffer of a step's inputs, and its padding."""

from __future__ import annotations

import torch

from optkit.runtime.cuda.layout import Layout, StepShape, capacity


def test_padding_is_what_no_kernel_acts_on_and_nothing_old_is_left() -> None:
    import numpy as np

    from optkit.runtime.cuda.runner import full_step, nothing

    layout = Layout(StepShape(4, 4, 3), 4)
    buffer = np.full(layout.num_bytes, 255, dtype=np.uint8)
    layout.pack(full_step(StepShape(4, 4, 3), 8, 24), buffer)
    views = layout.views(torch.from_numpy(buffer))
    assert views["seq_lens"].tolist() == [24] * 4 and views["positions"].tolist() == [23] * 4
    layout.pack(nothing() | {"query_start": np.array([0, 1]), "seq_lens": np.array([7])}, buffer)
    assert views["slot_mapping"].tolist() == [-1] * 4
    assert views["seq_lens"].tolist() == [7, 0, 0, 0]
    assert views["query_start"].tolist() == [0, 1, 1, 1, 1]
    assert not views["block_tables"].any() and views["source"].tolist() == [-1] * 4


def test_further_groups_have_places_of_their_own_or_those_of_the_first() -> None:
    import numpy as np

    from optkit.runtime.cuda.runner import full_step

    shape, further = (
        StepShape(4, 2, 3),
        (("slot_mapping_1", "slot_mapping"), ("block_tables_1", "block_tables")),
    )
    layout = Layout(shape, 2, further)
    assert capacity(shape, further) > capacity(shape)
    buffer = np.full(layout.num_bytes, 255, dtype=np.uint8)
    views = layout.views(torch.from_numpy(buffer))
    arrays = full_step(shape, 8, 24) | {"block_tables": np.full((2, 3), 5), "slot_mapping": np.arange(3)}
    layout.pack(arrays, buffer)
    assert (views["block_tables_1"] == 5).all() and views["slot_mapping_1"].tolist() == [0, 1, 2, -1]
    layout.pack(arrays | {"block_tables_1": np.full((2, 2), 7)}, buffer)
    assert views["block_tables_1"].tolist() == [[7, 7, 0]] * 2 and (views["block_tables"] == 5).all()
    eight = [offset for name, offset in layout.offsets.items() if name and views[name].itemsize == 8]
    assert len(eight) == 7 and not any(offset % 8 for offset in eight)
