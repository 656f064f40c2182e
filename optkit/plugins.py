"""Plug-ins: packages outside of optkit with passes, ops with kernels, and recipes, by entry points.

===================  =====================================================  ==========================
group                value of an entry point                                read by
===================  =====================================================  ==========================
``optkit.passes``    ``module:Class``, a pass under the entry's name        ``optkit.passes``
``optkit.ops``       a module with ``OPS`` and ``KERNELS``                  ``optkit.graph.ops.plugins``
``optkit.recipes``   a package with YAML files, a recipe by each file name  ``optkit.recipe.load``
===================  =====================================================  ==========================

An installed package is trusted code, as any package is. Nothing of a plug-in is imported before a recipe, a graph or
``optkit doctor`` asks for the name. A failed import is an error with the names of plug-in and package where something
needs the plug-in, and a line in the log elsewhere. docs/plugins.md is the contract.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from optkit.errors import UserError, first_line

INSTALL = "install the package that brings it"
PASSES, OPS, RECIPES = GROUPS = ("optkit.passes", "optkit.ops", "optkit.recipes")


@dataclass(frozen=True)
class PlugIn:
    """An entry point of an installed package.

    Attributes:
        name: of the pass, of the namespace of ops, or of the collection of recipes.
        package, version: of the distribution.
    """

    group: str
    name: str
    package: str
    version: str
    entry: EntryPoint

    def __str__(self) -> str:
        return f"plug-in '{self.name}' ({self.group}, package {self.package} {self.version})"

    @property
    def module(self) -> str:
        """The module of the entry point."""
        return self.entry.value.partition(":")[0].strip()


class PlugInError(UserError):
    """An unusable plug-in; the error names plug-in and package."""

    def __init__(self, plugin: PlugIn, what: str) -> None:
        super().__init__(what, where=str(plugin), fix=f"correct or uninstall the package {plugin.package}")


class MissingPlugIn(UserError):
    """A name of a plug-in without an installed package.

    Attributes:
        name: of the plug-in.
    """

    def __init__(self, name: str, what: str, where: str | None = None, fix: str = INSTALL) -> None:
        super().__init__(what, where=where, fix=fix)
        self.name = name


def installed(group: str) -> list[PlugIn]:
    """The plug-ins of ``group``, by name."""
    found = [
        PlugIn(group, e.name, e.dist.name if e.dist else "?", e.dist.version if e.dist else "?", e)
        for e in entry_points(group=group)
    ]
    return sorted(found, key=lambda plugin: (plugin.name, plugin.package))


def find(group: str, name: str) -> PlugIn | None:
    """The plug-in ``name`` of ``group``; None without an installed package.

    Raises:
        PlugInError: two packages bring the name.
    """
    found = [plugin for plugin in installed(group) if plugin.name == name]
    if len(found) > 1:
        packages = ", ".join(plugin.package for plugin in found)
        raise PlugInError(found[0], f"several packages bring it: {packages}")
    return found[0] if found else None


def load(plugin: PlugIn) -> Any:
    """The object of the entry point.

    Raises:
        PlugInError: the import failed.
    """
    try:
        return plugin.entry.load()
    except (Exception, SystemExit) as error:
        raise PlugInError(
            plugin, f"it can't be imported: {type(error).__name__}: {first_line(error)}"
        ) from error
