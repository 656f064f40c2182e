"""GGUF files of the checkpoints of ``bench.random_llama``, so llama.cpp runs the same weights.

    python -m bench.random_gguf DIR --tokens smollm2-135m -o FILE

Weights stay bfloat16 and are read from the mapped shards, so memory holds a few of them at a time. The tokens come from
another GGUF of the same tokenizer; ids of the vocabulary beyond them become unused tokens. ``bench.peers --gguf FILE``
quantizes the file for llama.cpp.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from bench.figures import command_line
from optkit.checkpoint.locate import ALIASES, packaged_gguf

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
UNUSED = 5  # GGUF's type of a token without use


def gguf_name(name: str) -> str:
    """``blk.3.attn_q.weight`` for ``model.layers.3.self_attn.q_proj.weight``."""
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{NAMES[part]}.weight"


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection [heads * D, H] in llama.cpp's order: both halves of a head take turns."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


def rope_factors(config: dict[str, Any]) -> np.ndarray:
    """Divisors of the rotary frequencies [D / 2] float32 for ``rope_type: llama3`` (Llama 3.1's model card)."""
    rope, size = config["rope_scaling"], config["hidden_size"] // config["num_attention_heads"]
    old, low, high = (
        rope[name] for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    factors = []
    for index in range(0, size, 2):
        turns = old / (2 * math.pi * config["rope_theta"] ** (index / size))  # in the original length
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def write_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write the shape of the model."""
    heads = config["num_attention_heads"]
    writer.add_name("random llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def write_tokens(writer: gguf.GGUFWriter, source: Path, vocab_size: int) -> None:
    """Copy the tokenizer of the GGUF ``source``, with unused tokens up to ``vocab_size``."""
    for name, field in gguf.GGUFReader(source).fields.items():
        if not name.startswith("tokenizer."):
            continue
        value, kind = field.contents(), field.types[0]
        if name == "tokenizer.ggml.tokens":
            value = [*value, *(f"[unused{index}]" for index in range(len(value), vocab_size))]
        elif name == "tokenizer.ggml.token_type":
            value = [*value, *[UNUSED] * (vocab_size - len(value))]
        elif name == "tokenizer.ggml.scores":
            value = [*value, *[0.0] * (vocab_size - len(value))]
        writer.add_key_value(name, value, kind, field.types[1] if len(field.types) > 1 else None)


def write_tensors(writer: gguf.GGUFWriter, directory: Path, config: dict[str, Any]) -> None:
    """Write the weights: matrices in bfloat16, vectors in float32, as llama.cpp's own converter does."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    index = json.loads((directory / "model.safetensors.index.json").read_text("utf-8"))["weight_map"]
    pending = []
    for name, shard in index.items():
        with safe_open(directory / shard, framework="pt") as file:
            shape = tuple(file.get_slice(name).get_shape())
        matrix = len(shape) > 1
        kind = gguf.GGMLQuantizationType.BF16 if matrix else gguf.GGMLQuantizationType.F32
        number_type = np.dtype(np.uint16 if matrix else np.float32)
        writer.add_tensor_info(
            gguf_name(name), shape, number_type, math.prod(shape) * number_type.itemsize, kind
        )
        pending.append((name, shard))
    factors = rope_factors(config)
    writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shard in pending:
        with safe_open(directory / shard, framework="pt") as file:
            value = file.get_tensor(name)
        module = name.split(".")[-2]
        value = interleaved(value, heads[module]) if module in heads else value
        writer.write_tensor_data(
            value.contiguous().view(torch.uint16).numpy() if value.dim() > 1 else value.float().numpy()
        )
    writer.write_tensor_data(factors)


def write_gguf(directory: Path, tokens: Path, target: Path) -> None:
    """Write the checkpoint of ``directory`` as GGUF ``target``, with the tokenizer of the GGUF ``tokens``."""
    config = json.loads((directory / "config.json").read_text("utf-8"))
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    write_settings(writer, config)
    write_tokens(writer, tokens, config["vocab_size"])
    write_tensors(writer, directory, config)
    writer.close()
    partial.rename(target)


def main() -> int:
    parser = command_line("bench.random_gguf", __doc__)
    parser.add_argument("directory", type=Path, help="checkpoint of bench.random_llama")
    parser.add_argument("--tokens", required=True, help="GGUF file, or alias, with the tokenizer")
    parser.add_argument("-o", "--out", type=Path, required=True)
    arguments = parser.parse_args()
    tokens = packaged_gguf(arguments.tokens) if arguments.tokens in ALIASES else Path(arguments.tokens)
    write_gguf(arguments.directory, tokens, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
