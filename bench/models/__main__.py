"""Runs a figure of a kind of models: ``python -m bench.models NAME ...``; without a name the list of figures."""

from __future__ import annotations

import sys

import bench.models
from bench.figures import run

if __name__ == "__main__":
    sys.exit(run(bench.models, sys.argv[1:]))
