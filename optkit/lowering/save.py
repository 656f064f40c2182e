"""Saving of lowered models whose steps are native calls alone, for starts without torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from optkit.graph.states import kv_of, recurrent_of
from optkit.kernels.cpu import native
from optkit.kernels.cpu.call_list import ALIGN, CallList
from optkit.lowering import saved_file
from optkit.lowering.lower import Executable, LoweredVariant
from optkit.lowering.saved_file import Calls
from optkit.lowering.to_native import program_of


def save(model: Executable, hidden: Executable | None, key: str, *, takes_trees: bool = False) -> None:
    """Write ``model``, which ``is_savable``, for starts without torch.

    Args:
        hidden: the model without the output head, over the same weights; left out where it needs torch.
        key: the name (``saved_file.key_of``).
        takes_trees: steps of ``model`` may have trees of guesses.

    Raises:
        OSError, UserError: a full disk, or no private cache.
    """
    body = Body()
    variants = [body.add(variant) for variant in model.variants]
    without_head = hidden.variants if hidden is not None and is_savable(hidden) else ()
    header = {
        "kv": kv_of(model.states),
        "recurrent": recurrent_of(model.states),
        "vocab_size": model.vocab_size,
        "max_model_len": model.max_model_len,
        "keeps_all": model.keeps_all,
        "variants": tuple(variants),
        "hidden": tuple(body.add(variant) for variant in without_head),
        "takes_trees": takes_trees,
        "weight_bytes": model.weight_bytes,
    }
    saved_file.write(header, body.parts, key)


def is_savable(model: Executable) -> bool:
    """True for a model on a CPU of native calls alone, up to ``MOST_BYTES`` of weights."""
    return (
        model.device.type == "cpu"
        and native.available()
        and model.weight_bytes <= saved_file.MOST_BYTES
        and all(program_of(variant) is not None for variant in model.variants)
    )


class Body:
    """The body of a file: lists of calls, and weights, each once."""

    def __init__(self) -> None:
        self.parts: list[memoryview | bytes] = []
        self._size = 0
        self._places: dict[tuple[int, int], int] = {}  # by address and bytes

    def add(self, variant: LoweredVariant) -> Calls:
        """Add the calls and the weights of ``variant``."""
        found = program_of(variant)
        if found is None:
            raise ValueError("the variant is no program")
        program, inputs = found
        constants = zip(program.constant_at, program.constants, strict=True)
        places = tuple((number, self._weight(tensor), tensor.nbytes) for number, tensor in constants)
        calls: CallList = program.calls
        ((_, (width,), _),) = program.outputs
        return Calls(
            limit=variant.limit,
            inputs=inputs,
            width=width,
            plan=calls.plan,
            calls=self._append(calls.calls),
            arguments=self._append(calls.arguments),
            constants=places,
        )

    def _weight(self, tensor: Tensor) -> int:
        """The place of ``tensor``, whose memory is added unless it is there."""
        key = (tensor.data_ptr(), tensor.nbytes)
        if key not in self._places:
            data: np.ndarray = tensor.contiguous().view(-1).view(torch.uint8).numpy()
            self._places[key], _ = self._append(data.data)
        return self._places[key]

    def _append(self, data: memoryview | bytes) -> tuple[int, int]:
        """Place, on a cache line, and bytes of ``data``."""
        padding = -self._size % ALIGN
        if padding:
            self.parts.append(bytes(padding))
        at, size = self._size + padding, len(data)
        self.parts.append(data)
        self._size = at + size
        return at, size
