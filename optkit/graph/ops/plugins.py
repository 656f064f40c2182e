"""Ops of plug-ins: registered under ``NAMESPACE.NAME`` when a pass of a plug-in is loaded or a graph names one.

The module of an entry point ``NAMESPACE`` in the group ``optkit.ops`` has ``OPS``, a sequence of ``record.Op``, and may
have ``KERNELS``, a mapping from a kind of target (``cpu``, ``cuda``) to a sequence of ``Kernel`` for these ops, best
first. An op without a kernel for a target runs its reference. The list of ops of a graph stays closed: a ``graph.json``
can name only ops of installed packages.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from optkit import kernels, plugins
from optkit.graph import ops
from optkit.graph.ops.record import Op, Work
from optkit.kernels.kernel import Kernel
from optkit.plugins import MissingPlugIn, PlugIn, PlugInError

log = logging.getLogger(__name__)

SEPARATOR = "."
RESERVED = ("aten",)  # namespaces of optkit's own
WORK = (Work.POINTWISE, Work.GATHER, Work.LINEAR)
# Fields on which other parts of optkit build: memory of states, storage formats, rewrites of lowering.
OWN_FIELDS = ("mutates", "only_lowered", "quantized", "packed", "dequantize", "linear", "inputs")

registered: dict[str, PlugIn] = {}
failed: dict[str, PlugInError] = {}


def target_of(name: str) -> Any:
    """The callable of op ``name`` of a graph file; a plug-in's op is registered on first use.

    Raises:
        KeyError: no such op.
        MissingPlugIn: the op of a plug-in that is not installed.
        PlugInError: the plug-in can't be used, or has no such op.
    """
    namespace, dot, _ = name.partition(SEPARATOR)
    if name in ops.OPS or not dot or namespace in RESERVED:
        return ops.OPS[name]
    plugin = plugins.find(plugins.OPS, namespace)
    if plugin is None:
        what = f"the graph has the op '{name}' of the plug-in '{namespace}', which is not installed"
        raise MissingPlugIn(namespace, what)
    register(plugin)
    if name not in ops.OPS:
        raise PlugInError(plugin, f"it has no op '{name}', which the graph names")
    return ops.OPS[name]


def register_all() -> None:
    """Register the ops of every plug-in; for a plug-in that can't be used, a line in the log, once."""
    for plugin in plugins.installed(plugins.OPS):
        if plugin.name not in failed:
            try:
                register(plugin)
            except PlugInError as error:
                failed[plugin.name] = error
                log.warning("%s", error)


def register(plugin: PlugIn) -> None:
    """Register the ops and kernels of ``plugin``, once.

    Raises:
        PlugInError: the module can't be imported, or its ops or kernels break the contract.
    """
    if plugin.name in registered:
        return
    module = plugins.load(plugin)
    records = [replace(op, namespace=plugin.name) for op in checked_ops(plugin, module)]
    rows = {
        kind: list(checked_kernels(plugin, kind, of_kind, records))
        for kind, of_kind in tables(plugin, module)
    }
    ops.add(records)
    for kind, found in rows.items():
        kernels.add(kind, found)
    registered[plugin.name] = plugin


def checked_ops(plugin: PlugIn, module: Any) -> list[Op]:
    """``OPS`` of ``module``.

    Raises:
        PlugInError: not a sequence of records within the contract.
    """
    if not plugin.name.isidentifier() or plugin.name in RESERVED:
        raise PlugInError(plugin, "a namespace of ops is an identifier, and not 'aten'")
    found = list(getattr(module, "OPS", ()) or ())
    if not found or not all(isinstance(op, Op) for op in found):
        raise PlugInError(plugin, f"{plugin.module} needs OPS, a sequence of optkit.graph.ops.record.Op")
    defaults = {f.name: f.default for f in fields(Op)}
    for op in found:
        name = op.reference.__name__
        taken = [key for key in OWN_FIELDS if getattr(op, key) and getattr(op, key) != defaults[key]]
        if taken:
            raise PlugInError(plugin, f"op '{name}': '{taken[0]}' is for ops of optkit alone")
        if op.work not in WORK:
            raise PlugInError(plugin, f"op '{name}': work is one of {', '.join(w.name for w in WORK)}")
        parameters = list(inspect.signature(op.reference).parameters)
        if parameters != [operand.name for operand in op.operands]:
            raise PlugInError(
                plugin, f"op '{name}': the operands are not the parameters {parameters} of its reference"
            )
    return found


def tables(plugin: PlugIn, module: Any) -> Iterable[tuple[str, Any]]:
    """``KERNELS`` of ``module`` by kind of target.

    Raises:
        PlugInError: not a mapping.
    """
    found = getattr(module, "KERNELS", {})
    if not isinstance(found, Mapping) or not set(found) <= {"cpu", "cuda"}:
        raise PlugInError(
            plugin, "KERNELS maps 'cpu' and 'cuda' to sequences of optkit.kernels.kernel.Kernel"
        )
    return found.items()


def checked_kernels(plugin: PlugIn, kind: str, rows: Any, records: list[Op]) -> Iterable[Kernel]:
    """The kernels of a kind, for the ops of the plug-in.

    Raises:
        PlugInError: a row is no kernel, or for another op.
    """
    names = {op.reference.__name__: op.name for op in records}
    for row in rows:
        if not isinstance(row, Kernel) or row.op not in names:
            raise PlugInError(
                plugin, f"KERNELS['{kind}'] has a row that is no Kernel for one of {', '.join(names)}"
            )
        yield replace(row, op=names[row.op])
