"""The machine: targets, ceilings and load, the private cache, locks, checksums, mapped files, logs, parents."""
