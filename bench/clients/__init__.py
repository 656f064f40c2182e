"""Further load generators, unmodified, beside ``optkit bench`` on a server: the same load, the same formulas."""
