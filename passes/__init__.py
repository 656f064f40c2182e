"""The pass table: one pass a file, one row here."""
