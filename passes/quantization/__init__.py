"""The common parts of quantizing passes: formats, grids, solvers, the calibrated walk."""
