"""The machine at hand as the target of a recipe or an artifact."""

from __future__ import annotations

from optkit.machine.target import Target, get_target
from optkit.machine.target_cuda import first_gpu, present_gpu, target_of


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


def planning_target(name: str) -> tuple[Target, str]:
    """The machine to plan for with a recipe for the target ``name``, and a line about the choice, or an empty text.

    A CUDA GPU that is here is planned by its own row of the table of hardware, or else by measured ceilings, also where
    the recipe names another GPU. Without a GPU the plan is for the named one.
    """
    wanted = get_target(name)
    if wanted.kind == "cpu":
        return wanted, ""
    gpu = first_gpu()
    if gpu is None:
        return wanted, f"no CUDA GPU here: planned for {wanted.name} from the data sheet"
    here = target_of(gpu)
    if here.name == wanted.name:
        return here, ""
    return (
        here,
        f"the recipe is for {wanted.name}; planned for the GPU of this machine, {gpu.text}, as {here.name}",
    )
