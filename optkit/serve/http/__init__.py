"""The HTTP layer below OpenAI's endpoints: access, limits, bodies, errors."""
