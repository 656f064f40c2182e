"""Time to first token with a prompt computed before: baked into the artifact, or while typed."""
