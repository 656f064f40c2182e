"""The buffer of a step's inputs, and its padding."""

from __future__ import annotations

import torch

from optkit.runtime.cuda.layout import Layout, StepShape


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
