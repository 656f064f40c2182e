"""Faults of a device, known without importing torch."""

from __future__ import annotations

import sys


def is_device_fault(error: BaseException) -> bool:
    """True for a fault after which the device runs nothing any more, for no request (torch.AcceleratorError)."""
    kind = getattr(sys.modules.get("torch"), "AcceleratorError", None)
    return kind is not None and isinstance(error, kind)
