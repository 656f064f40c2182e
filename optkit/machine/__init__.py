"""The machine: targets and ceilings, the private cache directory, locks, checksums, mapped files, logs, parents."""
