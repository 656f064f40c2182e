"""Measurements of fleets: a module a figure."""
