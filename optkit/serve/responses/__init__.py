"""OpenAI's Responses endpoint, without a memory: its requests as chat requests, and its answers."""
