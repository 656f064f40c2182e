"""The optimizer: runs passes, judges each, keeps the evidence, writes the artifact."""
