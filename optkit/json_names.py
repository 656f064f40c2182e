"""JSON keys with other names in the code: files and answers keep the keys of format 1.

The keys are read from report.json, ``optkit inspect --json``, ``optkit eval --json`` and ``/v1/models``.
"""

from __future__ import annotations

JSON_NAMES = {"fallback": "restored", "variants": "forms", "variant_limits": "form_limits"}
