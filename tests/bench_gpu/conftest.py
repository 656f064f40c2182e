"""Kernels run by Triton's interpreter here, too."""

from tests.kernels.triton.conftest import (  # noqa: F401 - fixtures
    bounds_of_loops_are_numbers,
    float8_rounds_right,
)
