"""Text: tokenizers, chat templates, detokenization, and the bundled corpora."""
