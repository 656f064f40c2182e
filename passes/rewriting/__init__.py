"""Graph rewrites that several passes share."""
