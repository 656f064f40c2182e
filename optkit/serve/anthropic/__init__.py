"""Anthropic's Messages endpoint: requests as chat requests, and the writer of answers."""
