"""Runs a figure of the fleet: ``python -m bench.fleet NAME ...``; without a name the list of figures."""

from __future__ import annotations

import sys

import bench.fleet
from bench.figures import run

if __name__ == "__main__":
    sys.exit(run(bench.fleet, sys.argv[1:]))
