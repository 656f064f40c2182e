"""The choice of a request on SpecPrefill, as a message between processes."""

from __future__ import annotations

from typing import Annotated

import msgspec

KeepShare = Annotated[float, msgspec.Meta(gt=0, le=1)]


class SpecPrefill(msgspec.Struct, frozen=True, kw_only=True):
    """The choice of a request; what is None follows the engine's options.

    Attributes:
        enabled: compute a part of the prompt's tokens.
        keep_pct: the share of the prompt's tokens to keep, in (0, 1]; named as in other engines.
    """

    enabled: bool | None = None
    keep_pct: KeepShare | None = None
