"""The SDKs of OpenAI (3) and Anthropic, and agents upon them, in ``.agents``."""
