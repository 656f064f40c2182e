"""Graph rewrites common to several passes."""
