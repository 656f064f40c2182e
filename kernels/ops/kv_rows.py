"""The rows of KV pools of codes: the codes of a head's channels, then the scale."""

from __future__ import annotations

KV_SCALE_BYTES = 4  # of the float32 scale of an int8 or float8 row
