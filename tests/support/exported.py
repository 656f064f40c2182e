"""Each model exported once: ``torch.export`` takes seconds, and what it gives follows from the code and configuration.

The program is kept and handed out with the tensors of the model at hand. Whether it is right for that model is not
taken on trust: every capture ends by comparing the graph's logits with the model's. A test that gives a module another
``forward`` has another model; one that changes how models compute otherwise must export by ``torch.export`` itself.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from optkit.capture.export import LogitsOf


class ExportOnce:
    """Stands in for ``optkit.capture.export.export``."""

    def __init__(self, export: Callable[[Any], Any]) -> None:
        self.export = export
        self.programs: dict[Any, Any] = {}

    def __call__(self, model: Any) -> Any:
        tensors = tensors_of(model)
        key = identity(model, tensors)
        if key not in self.programs:
            self.programs[key] = self.export(model)
        program = self.programs[key]
        return SimpleNamespace(
            graph=program.graph,
            graph_signature=program.graph_signature,
            state_dict={name: tensors[name] for name in program.state_dict},
            constants={name: tensors.get(name, value) for name, value in program.constants.items()},
        )


def tensors_of(model: Any) -> dict[str, Tensor]:
    """Parameters and buffers under the names of the exported module; tied ones under each of theirs."""
    module = LogitsOf(model)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return parameters | dict(module.named_buffers(remove_duplicate=False))


def identity(model: Any, tensors: dict[str, Tensor]) -> Any:
    """What the trace follows from: configuration, code of each module, kind of each tensor and which are the same."""
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    kinds = tuple((n, t.shape, t.dtype, t.device.type, first[id(t)]) for n, t in tensors.items())
    code = tuple((name, type(module), type(module).forward) for name, module in model.named_modules())
    return model.config.to_json_string(use_diff=False), model.config._attn_implementation, code, kinds
