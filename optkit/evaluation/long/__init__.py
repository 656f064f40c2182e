"""Long contexts: tasks with evidence far back, scored by the log probability of the true answer."""
