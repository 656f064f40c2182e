"""Text and tokens: tokenizers, chat templates, the bundled corpora."""
