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

import torch

from optkit.artifact import Artifact
from optkit.cli import verify as verify_command
from optkit.cli.main import run as cli
from optkit.errors import UserError
from optkit.graph import ir
from optkit.runtime.engine import RequestFailed
from optkit.runtime.load import load_engine
from optkit.runtime.types import EngineRefusal, SamplingParams

PROMPTS = [[3 + i % 100 for i in range(n)] for n in (5, 19, 1)]
BLOCKS = 6  # of 8 tokens: the prompts and their answers, and one
SAMPLING = SamplingParams(max_tokens=3, temperature=0.0)
DIFFERS = (2, verify_command.DIFFERS)


@dataclass(frozen=True)
class Outcome:
    """``kind`` is "refused", "ran" or "failed"; ``cause`` groups failures, ``detail`` is for people."""

    kind: str
    cause: str = ""
    detail: str = ""


def trial(directory: Path) -> Outcome:
    """What becomes of the artifact in ``directory``."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli(["verify", "--json", str(directory)])
    if code:
        return refusal(code, out.getvalue(), err.getvalue(), directory)
    try:
        engine = load_engine(str(directory), {})
    except UserError as error:
        return Outcome("refused", "serve", str(error))
    except Exception as error:  # noqa: BLE001 - the fuzzer's finding
        return failure("serve", error)
    try:
        engine.generate(PROMPTS, SAMPLING)
    except (EngineRefusal, RequestFailed) as error:
        return Outcome("ran", "a request failed", str(error))
    except Exception as error:  # noqa: BLE001 - the fuzzer's finding
        return failure("step", error)
    return Outcome("ran")


def refusal(code: int, out: str, err: str, directory: Path) -> Outcome:
    """A refusal by ``optkit verify``, which must be a line or more on what is wrong, by exit code 2 or 3."""
    if code not in DIFFERS:
        return failure("verify", uncaught(directory)) if code == 1 else Outcome("failed", f"exit {code}", err)
    problems = json.loads(out)["problems"] if code == verify_command.DIFFERS else [err.strip()]
    if not problems or not all(problems):
        return Outcome("failed", "refused without a reason", out + err)
    if code == verify_command.DIFFERS and any("\n" in line for line in problems):
        return Outcome("failed", "a reason of several lines", "\n".join(problems))
    return Outcome("refused", "verify", problems[0])


def uncaught(directory: Path) -> BaseException:
    """The exception that ended ``optkit verify``."""
    try:
        artifact = Artifact(directory, verify_command_manifest(directory))
        list(verify_command.file_problems(artifact)) or list(verify_command.content_problems(artifact))
    except Exception as error:  # noqa: BLE001
        return error
    return RuntimeError("it did not happen again")


def verify_command_manifest(directory: Path) -> Any:
    from optkit.artifact import read_manifest

    return read_manifest(directory)


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
    from optkit.runtime import load

    fitting = load.blocks_for_bytes
    load.blocks_for_bytes = lambda *given: min(BLOCKS, fitting(*given))


def on_the_heap() -> None:
    """Have KV pools and the tensors of files on the heap from now on."""
    import safetensors.torch

    from optkit import checkpoint_tensors

    load_file, get = safetensors.torch.load_file, checkpoint_tensors.TensorFiles.__getitem__

    def copied(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in load_file(*args, **kwargs).items()}

    safetensors.torch.load_file = copied
    checkpoint_tensors.TensorFiles.__getitem__ = lambda self, name: get(self, name).clone()  # type: ignore[method-assign]
    ir.unwritten_zeros = lambda shape, dtype, device: torch.zeros(shape, dtype=dtype, device=device)
