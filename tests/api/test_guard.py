"""Exceptions of the API are those of optkit."""

from __future__ import annotations

from typing import Any

import pytest

from optkit.api.guard import guarded
from optkit.errors import EngineError, OptkitError, UserError


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (PermissionError(13, "Permission denied", "/x"), UserError, "/x: Permission denied"),
        (ModuleNotFoundError("no", name="fancy.thing"), UserError, "pip install fancy"),
        (EngineError("gone"), EngineError, "gone"),
        (UserError("wrong"), UserError, "wrong"),
        (ValueError("a bug"), ValueError, "a bug"),
    ],
)
def test_guarded_turns_refusals_into_user_errors_and_leaves_the_rest(
    error: Any, kind: Any, message: str
) -> None:
    @guarded
    def fail() -> None:
        """Fail."""
        raise error

    with pytest.raises(kind, match=message) as raised:
        fail()
    assert isinstance(raised.value, OptkitError) == (kind is not ValueError)
    assert fail.__doc__ == "Fail."
