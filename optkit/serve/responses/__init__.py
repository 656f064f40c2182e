"""OpenAI's Responses endpoint, without storage: requests as chat requests, and the writer of answers."""
