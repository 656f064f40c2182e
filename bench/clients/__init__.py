"""Other load generators, unmodified, against ``optkit bench`` on one server: the same load, the same formulas."""
