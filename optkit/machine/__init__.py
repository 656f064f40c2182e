"""The machine: what it can do, where its private files lie, checksums, logs."""
