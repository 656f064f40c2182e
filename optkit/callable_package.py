"""Packages as functions: ``optkit.bench(...)`` and ``optkit.recipe(...)`` beside ``import optkit.bench``.

The function has the last name of the package and lies in a module of ``optkit.api`` with the same name. A package
becomes callable by a subclass of the module type, as the language reference describes under "Customizing module
attribute access"; nothing is imported before the first call.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inspect import Signature


class CallablePackage(ModuleType):
    """A package of optkit, called like the function with the same name."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return function_of(self.__name__)(*args, **options)

    @property
    def __signature__(self) -> Signature:
        """The function's signature, for ``help`` and notebooks."""
        from inspect import signature

        return signature(function_of(self.__name__))


def function_of(package: str) -> Any:
    """The function with the last name of ``package``."""
    name = package.rpartition(".")[2]
    return getattr(importlib.import_module(f"optkit.api.{name}"), name)


def make_callable(package: str) -> None:
    """Make the imported ``package`` callable."""
    sys.modules[package].__class__ = CallablePackage
