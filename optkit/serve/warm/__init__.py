"""Prefixes computed before the first request: ``/v1/cache/warm`` (docs/http-api.md)."""
