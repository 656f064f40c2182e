"""Runs a figure of smaller models: ``python -m bench.smaller NAME ...``; without a name the list of figures."""

from __future__ import annotations

import sys

import bench.smaller
from bench.figures import run

if __name__ == "__main__":
    sys.exit(run(bench.smaller, sys.argv[1:]))
