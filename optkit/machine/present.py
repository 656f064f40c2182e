"""The machine at hand as the target of a recipe or an artifact."""

from __future__ import annotations

from optkit.machine.target import Target, get_target
from optkit.machine.target_cuda import present_gpu


def present_target(name: str, where: str | None = None, fix: str | None = None) -> Target:
    """This machine as a target, if what is made for the target ``name`` runs on it.

    A GPU may be another one than is named: the result is the GPU that is here. ``where`` and ``fix`` are for the error:
    what needs the target, and what to do without a GPU.

    Raises:
        UserError: it is a GPU's, and there is none here, or it lacks what the kernels need.
    """
    target = get_target(name)
    if target.kind == "cpu":
        return target
    return present_gpu(target, where, fix)
