"""Prefixes computed before they are asked for: ``/v1/cache/warm`` (docs/http-api.md)."""
