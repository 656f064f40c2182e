"""Small GGUF files of many architectures, with random blocks of any quantization type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

# Heads of 128 channels: transformers reads no other size from a qwen3 file.
WIDTH, FEED_FORWARD, VOCABULARY, HEADS, KV_HEADS = 256, 512, 64, 2, 1
# Bytes of a block at which its float16 scales lie; all other bytes are codes, of any value.
SCALES: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


def random_blocks(kind: str, rows: int, columns: int, seed: int) -> np.ndarray[Any, Any]:
    """Random blocks of ``kind`` for a matrix [rows, columns], uint8 [rows, bytes]."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows * columns // values, size), dtype=np.uint8)
    for place in SCALES[kind]:
        scale = generator.uniform(0.001, 0.02, len(blocks)).astype(np.float16)
        blocks[:, place : place + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def write_gguf(file: Path, architecture: str, kind: str, leave_out: str = "") -> dict[str, Any]:
    """Write a one-layer model whose matrices are of ``kind``; gives its tensors as written, by name in the file."""
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(file, architecture)
    head = WIDTH // HEADS
    numbers = {
        "context_length": 128, "embedding_length": WIDTH, "block_count": 1, "feed_forward_length": FEED_FORWARD,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "vocab_size": VOCABULARY,
        "attention.key_length": head, "attention.value_length": head, "rope.dimension_count": head,
    }  # fmt: skip
    for key, value in numbers.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    if architecture == "gemma3":
        writer.add_uint32("gemma3.attention.sliding_window", 16)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{architecture}.rope.freq_base", 10000.0)
    written = tensors(architecture, kind)
    for name, value in written.items():
        if name != leave_out:
            raw = GGMLQuantizationType[kind] if value.dtype == np.uint8 else None
            writer.add_tensor(name, value, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def tensors(architecture: str, kind: str) -> dict[str, Any]:
    """Random tensors of a layer, an embedding and a head."""
    kv = WIDTH * KV_HEADS // HEADS
    matrices = {
        "token_embd": (VOCABULARY, WIDTH), "output": (VOCABULARY, WIDTH),
        "blk.0.attn_q": (WIDTH, WIDTH), "blk.0.attn_k": (kv, WIDTH), "blk.0.attn_v": (kv, WIDTH),
        "blk.0.attn_output": (WIDTH, WIDTH), "blk.0.ffn_gate": (FEED_FORWARD, WIDTH),
        "blk.0.ffn_up": (FEED_FORWARD, WIDTH), "blk.0.ffn_down": (WIDTH, FEED_FORWARD),
    }  # fmt: skip
    vectors = {"output_norm.weight": WIDTH, "blk.0.attn_norm.weight": WIDTH, "blk.0.ffn_norm.weight": WIDTH}
    if architecture == "qwen2":
        vectors |= {"blk.0.attn_q.bias": WIDTH, "blk.0.attn_k.bias": kv, "blk.0.attn_v.bias": kv}
    if architecture in ("qwen3", "gemma3"):
        vectors |= {f"blk.0.attn_{x}_norm.weight": WIDTH // HEADS for x in "qk"}
    if architecture == "gemma3":
        vectors |= {f"blk.0.post_{part}_norm.weight": WIDTH for part in ("attention", "ffw")}
    generator = np.random.default_rng(1)
    small = {name: generator.uniform(0.5, 1.5, size).astype(np.float32) for name, size in vectors.items()}
    blocks = {
        f"{name}.weight": random_blocks(kind, *shape, seed)
        for seed, (name, shape) in enumerate(matrices.items())
    }
    return blocks | small
