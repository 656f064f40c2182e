"""Recipes of the plug-in: one YAML file each."""
