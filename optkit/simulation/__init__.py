"""A simulated server: the real scheduler on a virtual clock, with predicted times in the place of computed steps."""
