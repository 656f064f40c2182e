"""The scheduler: which tokens of which request run in a step."""
