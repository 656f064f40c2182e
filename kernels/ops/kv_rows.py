"""The layouts of the bytes of KV pools of codes: sizes, and which pools of a CPU are interleaved."""

from __future__ import annotations

KV_SCALE_BYTES = 4  # of the float32 scale of a token's head, int8 or float8
LINE_TOKENS = 16  # tokens whose words of four bytes fill a cache line
WORD = 4  # codes that are multiplied at once: channels of a key, tokens of a value


def is_interleaved(block_size: int, k_dim: int, v_dim: int) -> bool:
    """True where int8 pools of K and V on a CPU are interleaved (``reference_attention``): sizes are whole lines."""
    return block_size % LINE_TOKENS == 0 and k_dim % WORD == 0 and v_dim % LINE_TOKENS == 0
