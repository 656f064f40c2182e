"""Recipes: schema, strict YAML, errors with line numbers."""
