"""The trial of one mutant: ``optkit verify``, then what ``optkit serve`` does, and requests that run together.

All in this process, through the functions that the commands call. KV pools and tensors of files lie on the heap here,
where AddressSanitizer sees their ends; as a rule they are pages of their own.
"""

from __future__ import annotations

import contextlib
import io
import json
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer

from optkit.cli import verify as verify_command
from optkit.errors import UserError
from optkit.graph import states
from optkit.runtime.engine import RequestFailed
from optkit.runtime.factory import open_engine
from optkit.runtime.types import EngineRefusal, SamplingParams

PROMPTS = [[3 + i % 100 for i in range(n)] for n in (5, 19, 1)]
BLOCKS = 6  # of 8 tokens: the prompts and their answers, and one
SAMPLING = SamplingParams(max_tokens=3, temperature=0.0)


@dataclass(frozen=True)
class Outcome:
    """``kind`` is "refused", "ran" or "failed"; ``cause`` groups failures, ``detail`` is for people."""

    kind: str
    cause: str = ""
    detail: str = ""


def trial(directory: Path) -> Outcome:
    """What becomes of the artifact in ``directory``."""
    refused = verified(directory)
    if refused is not None:
        return refused
    try:
        engine = open_engine(str(directory))
    except UserError as error:
        return refusal([str(error)])
    except Exception as error:  # noqa: BLE001 - the fuzzer's finding
        return failure("serve", error)
    try:
        engine.generate(PROMPTS, SAMPLING)
    except (EngineRefusal, RequestFailed) as error:
        return Outcome("ran", "a request failed", str(error))
    except Exception as error:  # noqa: BLE001 - the fuzzer's finding
        return failure("step", error)
    return Outcome("ran")


def verified(directory: Path) -> Outcome | None:
    """None if ``optkit verify`` accepts the artifact; its function, since building the command line costs as much."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            verify_command.verify(directory, as_json=True)
    except UserError as error:
        return refusal([str(error)])
    except typer.Exit as done:
        expected = done.exit_code == verify_command.DIFFERS
        return refusal(json.loads(out.getvalue())["problems"] if expected else [])
    except Exception as error:  # noqa: BLE001 - the fuzzer's finding
        return failure("verify", error)
    return None


def refusal(reasons: list[str]) -> Outcome:
    """A refusal, which must have reasons of a line each."""
    if not reasons or not all(reasons):
        return Outcome("failed", "refused without a reason")
    if any("\n" in reason for reason in reasons):
        return Outcome("failed", "a reason of several lines", "\n".join(reasons))
    return Outcome("refused", "verify", reasons[0])


def failure(stage: str, error: BaseException) -> Outcome:
    """An exception that nothing expects: the type and the innermost line of optkit group it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        f
        for f in frames
        if "/optkit/" in f.filename or "/kernels/ops/" in f.filename or "/passes/" in f.filename
    ]
    where = f"{Path(ours[-1].filename).name}:{ours[-1].name}" if ours else ""
    text = str(error).splitlines()[0][:160] if str(error) else ""
    detail = "".join(traceback.format_exception(error))
    return Outcome("failed", f"{stage}: {type(error).__name__} in {where}: {text}", detail)


def few_blocks() -> None:
    """Have KV pools so small from now on that the prompts fill them, and what is past their end is reached."""
    from optkit.graph.kv_layout import KVLayout

    fitting = KVLayout.blocks_in
    KVLayout.blocks_in = lambda *given: min(BLOCKS, fitting(*given))


def on_the_heap() -> None:
    """Have KV pools and the tensors of files on the heap from now on."""
    from optkit.checkpoint import tensors

    load_file, get = tensors.load_file, tensors.TensorFiles.__getitem__

    def copied(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in load_file(*args, **kwargs).items()}

    tensors.load_file = copied
    tensors.TensorFiles.__getitem__ = lambda self, name: get(self, name).clone()  # type: ignore[method-assign]
    states.unwritten = lambda shape, dtype: np.zeros(shape, dtype)
