"""Plans: predicted times, memory and load of a recipe on a machine, before a weight is read or a machine is rented."""
