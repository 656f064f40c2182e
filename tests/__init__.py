"""Tests, by the folders of what they test; tests/conftest.py has what holds for all."""

import os

os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # read as torch is loaded: who waits for a thread lets others work
