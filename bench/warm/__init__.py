"""Time to first token with the prompt computed before: baked into the artifact, or while it is typed."""
