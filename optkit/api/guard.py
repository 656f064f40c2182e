"""Errors of the Python API: each is an exception of optkit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from optkit.errors import OptkitError
from optkit.extras import explained

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def guarded(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """``function`` with a ``UserError`` in place of a missing package's or the operating system's exception.

    A user can fix a full disk, a path without permission and a missing package. Other exceptions are bugs and pass
    unchanged.
    """

    @functools.wraps(function)
    def call(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
        try:
            return function(*args, **options)
        except OptkitError:
            raise
        except Exception as error:
            known = explained(error)
            if known is None:
                raise
            raise known from error

    return call
