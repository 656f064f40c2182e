"""optkit: a compiler-driven optimization toolkit for language models.

The Python API, described in docs/python.md:

- ``optkit.optimize(model, recipe, out)`` compiles a model by a recipe into an artifact;
- ``optkit.load(artifact)`` gives an ``LLM`` with ``generate``, ``chat``, ``stream``, ``embed`` and ``logprobs``;
- ``optkit.bench(artifact)`` measures latency and throughput over HTTP;
- ``optkit.tune(model, slo)`` finds the recipe and the serve options that hold an objective;
- ``optkit.recipe(...)`` reads a recipe, or builds a recipe in Python;
- ``optkit.OptkitError`` is the base of the errors above.

Importing the package is cheap by design: neither torch nor transformers is imported before a function is called, so
``optkit --help`` answers at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from optkit.version import VERSION as __version__

if TYPE_CHECKING:
    from optkit.api.bench import BenchReport, bench
    from optkit.api.llm import LLM, load
    from optkit.api.optimize import OptimizeResult, optimize
    from optkit.api.progress import ProgressEvent
    from optkit.api.recipe import recipe
    from optkit.api.results import (
        Choice,
        Completion,
        Completions,
        Embeddings,
        ScoredText,
        TextPiece,
        TokenScore,
        ToolCall,
    )
    from optkit.api.tune import TuneReport, tune
    from optkit.errors import EngineError, OptkitError, UnsupportedModel, UserError
    from optkit.recipe.schema import Recipe

__all__ = [
    "LLM",
    "BenchReport",
    "Choice",
    "Completion",
    "Completions",
    "Embeddings",
    "EngineError",
    "OptimizeResult",
    "OptkitError",
    "ProgressEvent",
    "Recipe",
    "ScoredText",
    "TextPiece",
    "TokenScore",
    "ToolCall",
    "TuneReport",
    "UnsupportedModel",
    "UserError",
    "__version__",
    "bench",
    "load",
    "optimize",
    "recipe",
    "tune",
]

MODULES = {  # of public names, below this package
    "api.bench": ("BenchReport",),
    "api.llm": ("LLM", "load"),
    "api.optimize": ("OptimizeResult", "optimize"),
    "api.progress": ("ProgressEvent",),
    "api.results": (
        *(
            "Choice",
            "Completion",
            "Completions",
            "Embeddings",
            "ScoredText",
            "TextPiece",
            "TokenScore",
            "ToolCall",
        ),
    ),
    "api.tune": ("TuneReport",),
    "errors": ("EngineError", "OptkitError", "UnsupportedModel", "UserError"),
    "recipe.schema": ("Recipe",),
}
PACKAGES = ("bench", "recipe", "tune")  # functions, too: optkit.callable_package


def __getattr__(name: str) -> Any:
    if name in PACKAGES:
        return importlib.import_module(f"optkit.{name}")
    for module, names in MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"optkit.{module}"), name)
    raise AttributeError(f"module 'optkit' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
