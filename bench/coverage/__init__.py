"""Coverage of model types: a tiny model of each causal LM type of transformers, captured, compared and served."""
