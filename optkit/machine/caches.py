"""Caches of the CPU."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNITS = {"K": 1 << 10, "M": 1 << 20}
USUAL_BYTES = 32 << 20  # where the system does not say


@lru_cache(maxsize=1)
def last_level_cache_bytes(caches: Path = CACHES) -> int:
    """Bytes of the largest cache that the first core reads through; 32 MiB where the system does not say (not Linux).

    ``sysconf`` is no substitute: in a virtual machine glibc's number can be that of all caches of the host together.
    """
    sizes = (parsed(file.read_text("ascii")) for file in caches.glob("index*/size"))
    return max(sizes, default=0) or USUAL_BYTES


def parsed(text: str) -> int:
    """Bytes of a size such as ``32768K``; 0 for other text."""
    number, unit = text.strip()[:-1], text.strip()[-1:]
    return int(number) * UNITS[unit] if number.isdecimal() and unit in UNITS else 0
