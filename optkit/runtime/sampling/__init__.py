"""From logits to tokens: sampling, logprobs, speculative decoding."""
