"""What the quantizing passes share: formats, grids, solvers, the calibrated walk."""
