"""OpenAI's endpoints: request fields, prompts, generation, streams."""
