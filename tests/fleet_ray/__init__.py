"""Fleets on a real Ray, in an environment with Ray; ``make fleet`` runs them."""
