"""Tools and reasoning in a model's text: the formats of calls, the streaming parser, the grammars."""
