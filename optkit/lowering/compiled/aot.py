"""Ahead-of-time compilation of a region: a shared object for runs without the compiler.

AOTInductor turns the captured layer into C++ and compiles a ``.so`` with a plain C interface. A ``.json`` beside the
file names the operators of the code by schema: our opaque ops (``optkit.lowering.compiled.opaque``).
``AOTIModelContainerRunner`` of torch's C++ library reads the two files: no archive, no pickle, no Python. ``.pt2``
packages and Inductor's own caches are not used, since both hold pickles.

``torch.compile`` and ``torch.export`` are not needed: the graph is already captured, so Inductor gets the graph
itself, with symbols for the sizes that vary. Code with a condition over a symbol is refused: nothing could check the
condition at run time.
"""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from optkit.errors import first_line
from optkit.lowering.compiled.region import Argument, Code
from optkit.machine.paths import cache_dir

TAIL_TOKENS = 173  # the size the dynamic tail is tuned for; equal to no other size by chance
LIBRARY, OPERATORS = ".so", ".json"


class CompileError(Exception):
    """A failure of the compiler, or unusable code; the message holds the reason."""


def compile_region(
    module: fx.GraphModule, arguments: Sequence[Argument], tokens: int | None, destination: Path
) -> None:
    """Write the code of ``module`` for T = ``tokens``, or for any T, as ``destination.so`` and ``.json``.

    Raises:
        CompileError: the compiler fails.
    """
    with tempfile.TemporaryDirectory(
        prefix="aot-", dir=cache_dir("inductor"), ignore_cleanup_errors=True
    ) as directory:
        try:
            library = generate(module, arguments, tokens, directory)
        except CompileError:
            raise
        except Exception as error:  # whatever a compiler stumbles over: the layer then runs uncompiled
            raise CompileError(f"{type(error).__name__}: {first_line(error)}") from error
        operators = library.with_suffix(OPERATORS)
        shutil.move(library, destination.with_suffix(LIBRARY))
        if operators.exists():
            shutil.move(operators, destination.with_suffix(OPERATORS))


def generate(
    module: fx.GraphModule, arguments: Sequence[Argument], tokens: int | None, directory: str
) -> Path:
    """Compile in ``directory``; the shared object there."""
    import torch._inductor
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    options = {
        "aot_inductor.output_path": directory,
        "aot_inductor.precompile_headers": False,  # pays off after more compilations than one artifact has
        "compile_threads": 1,
        "cpp.dynamic_threads": True,  # as many threads as torch has when it runs, not when it was compiled
    }
    with private_cache(), quiet(), torch.inference_mode(False), torch.no_grad():
        examples = [example(mode, argument, i, tokens) for i, argument in enumerate(arguments)]
        with tracing(TracingContext(mode)):
            made = torch._inductor.aot_compile(copy.deepcopy(module), tuple(examples), options=options)
    conditions = [str(guard.expr) for guard in environment.guards if guard.expr.free_symbols]
    if conditions:
        raise CompileError(f"the code would rely on sizes: {', '.join(conditions)}")
    return Path(str(made))


def load(library: Path, device: str) -> Code:
    """The function in a compiled library. Neither the compiler nor a module of the compiler is imported.

    Opening the library runs code: only ``optkit.lowering.compiled.code_cache`` calls ``load``, after all checks.

    Raises:
        RuntimeError: the file is no library of AOTInductor.
    """
    runners = {"cpu": "AOTIModelContainerRunnerCpu", "cuda": "AOTIModelContainerRunnerCuda"}
    return getattr(torch._C._aoti, runners[device])(str(library), 1).run


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the compiler's deprecation warnings about compiler internals."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def private_cache() -> Iterator[None]:
    """Put Inductor's cache into optkit's private directory; the default is a predictable path in /tmp."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    os.environ[name] = str(cache_dir("inductor"))
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def example(mode: Any, argument: Argument, index: int, tokens: int | None) -> Tensor:
    """A fake input without data, with a symbol for each varying size."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    if argument.fixed is not None:
        return mode.from_tensor(argument.fixed, static_shapes=True)

    def kind(varies: bool, per_token: int) -> DimDynamic:
        if varies:
            return DimDynamic.DYNAMIC
        return (
            DimDynamic.DUCK if tokens is None and per_token else DimDynamic.STATIC
        )  # DUCK: one symbol for T

    kinds = [kind(v, p) for v, p in zip(argument.varies, argument.per_token, strict=True)]
    value = torch.empty(argument.sizes(tokens or TAIL_TOKENS), dtype=argument.dtype, device=argument.device)
    return mode.from_tensor(
        value,
        symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds),
        source=ConstantSource(f"input{index}"),
    )
