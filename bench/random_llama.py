"""Random Llama checkpoints of any size, written layer by layer, for measurements of memory and speed.

    python -m bench.random_llama DIR --shape 1b --tokenizer MODEL
    python -m bench.random_llama DIR --shape 8b --layers 4 --tokenizer MODEL

Shapes are those of Llama 3.2 1B, Llama 3.1 8B and a model of 300M parameters; ``--layers`` writes fewer layers of the
same sizes, for the memory that does not grow with their number. Weights are normal numbers of deviation
``0.02``, in bfloat16, in shards of about 1 GB. The tokenizer is that of a directory MODEL, of byte-level BPE; the
ids of the vocabulary beyond the tokenizer's are words that no text is tokenized to, so that every answer has text.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.figures import command_line

SHARD_BYTES = 1 << 30
TEXTS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")
ROPE = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
SHAPES = {
    "300m": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 16,
             "num_key_value_heads": 4, "vocab_size": 49152, "tie_word_embeddings": True},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False},
}  # fmt: skip


def config_of(shape: str) -> dict[str, object]:
    """config.json of a shape."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": 16384, "rope_theta": 500000.0, "rope_scaling": ROPE, "attention_bias": False,
        "mlp_bias": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, **SHAPES[shape],
    }  # fmt: skip


def shapes_of(config: dict[str, object]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors, layer after layer."""
    hidden, ffn, vocab = (int(str(config[k])) for k in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, kv_heads = (int(str(config[k])) for k in ("num_attention_heads", "num_key_value_heads"))
    kv = hidden // heads * kv_heads
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(int(str(config["num_hidden_layers"]))):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (rows, hidden)
        yield f"{prefix}.mlp.gate_proj.weight", (ffn, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (ffn, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, ffn)
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def random_tensor(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Normal numbers of deviation 0.02, or norm weights around 1; bfloat16, a few rows at a time."""
    if len(shape) == 1:
        return (1 + 0.1 * torch.randn(shape, generator=generator)).to(torch.bfloat16)
    value = torch.empty(shape, dtype=torch.bfloat16)
    for rows in value.split(4096):
        rows.copy_(torch.randn(rows.shape, generator=generator) * 0.02)
    return value


def write_model(
    directory: Path, shape: str, tokenizer: Path, seed: int = 0, layers: int | None = None
) -> None:
    """Write config, tokenizer and shards of ``shape``, with ``layers`` layers if given, to ``directory``."""
    directory.mkdir(parents=True)
    config, generator = config_of(shape), torch.Generator().manual_seed(seed)
    if layers is not None:
        config["num_hidden_layers"] = layers
    (directory / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
    for name in TEXTS:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, directory / name)
    if (directory / "tokenizer.json").is_file():
        add_words(directory / "tokenizer.json", int(str(config["vocab_size"])))
    placed: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    total = 0

    def flush() -> None:
        file = f"model-{len(set(placed.values())) + 1:05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        placed.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, size in shapes_of(config):
        shard[name] = random_tensor(size, generator)
        total += shard[name].nbytes
        if sum(tensor.nbytes for tensor in shard.values()) >= SHARD_BYTES:
            flush()
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")


def add_words(file: Path, size: int) -> None:
    """Give each id below ``size`` without an entry in the tokenizer ``file`` a word of its own."""
    tokenizer = json.loads(file.read_text("utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    known = set(vocabulary.values()) | {token["id"] for token in tokenizer["added_tokens"]}
    vocabulary |= {f"Ġword{index}": index for index in range(size) if index not in known}
    file.write_text(json.dumps(tokenizer, ensure_ascii=False), "utf-8")


def main() -> int:
    parser = command_line("bench.random_llama", __doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--layers", type=int, help="default: all layers of the shape")
    parser.add_argument("--tokenizer", type=Path, required=True, help="directory with tokenizer.json")
    arguments = parser.parse_args()
    write_model(arguments.directory, arguments.shape, arguments.tokenizer, layers=arguments.layers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
