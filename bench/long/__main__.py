"""Runs a figure of long prompts and answers: ``python -m bench.long NAME ...``; without a name the list of figures."""

from __future__ import annotations

import sys

import bench.long
from bench.figures import run

if __name__ == "__main__":
    sys.exit(run(bench.long, sys.argv[1:]))
