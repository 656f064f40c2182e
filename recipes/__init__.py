"""Recipes that ship with optkit: one YAML each."""
