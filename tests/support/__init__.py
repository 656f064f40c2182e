"""Helpers of the tests: tiny models, fakes, packed checkpoints, servers, and child processes."""
