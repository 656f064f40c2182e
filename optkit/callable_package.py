"""Packages that are functions, too: ``optkit.bench(...)`` and ``optkit.recipe(...)`` beside ``import optkit.bench``.

The function of package ``optkit.NAME`` is ``NAME`` in the module of the same name in ``optkit.api``. A package becomes
callable by a subclass of the module type, as the language reference describes under "Customizing module attribute
access"; nothing is imported before the first call.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inspect import Signature


class CallablePackage(ModuleType):
    """A package of optkit that is called like the function of its name."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return function_of(self.__name__)(*args, **options)

    @property
    def __signature__(self) -> Signature:
        """The function's signature, for ``help`` and notebooks."""
        from inspect import signature

        return signature(function_of(self.__name__))


def function_of(package: str) -> Any:
    """The function of package ``optkit.NAME``."""
    name = package.rpartition(".")[2]
    return getattr(importlib.import_module(f"optkit.api.{name}"), name)


def make_callable(package: str) -> None:
    """Make the imported ``package`` callable."""
    sys.modules[package].__class__ = CallablePackage
