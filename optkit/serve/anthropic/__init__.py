"""Anthropic's Messages endpoint: its requests as chat requests, and its answers."""
