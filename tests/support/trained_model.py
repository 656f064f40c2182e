"""A small Llama with trained weights: what quantizers are compared on besides the embedded model.

Random weights have no structure that calibration could use, and the embedded model's lie on a 4-bit grid already. This
one is trained here, on the shipped text, in minutes on two cores, with a byte-level BPE tokenizer of its own; the last
part of the evaluation text (``held_out``) is kept from both. It is a poor language model, and its weights are real
ones: float32, correlated, of very different importance.

Kept in optkit's cache directory under a hash of this file and of the text, so it is trained once a machine.

``python -m tests.support.trained_model`` trains it and says how it goes.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optkit.machine.paths import cache_dir
from optkit.text.corpora import load_text

VOCABULARY, LENGTH = 4096, 256
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}  # 5.8 M parameters
STEPS, BATCH, WARM_UP = 500, 8, 40
RATE, DECAY = 2e-3, 0.1
SHARE = 0.7  # of the evaluation text that is trained on


def training_text() -> str:
    evaluation = load_text("evaluation")
    return load_text("calibration") + evaluation[: int(SHARE * len(evaluation))]


def held_out() -> str:
    """Text that neither the model nor its tokenizer has seen."""
    evaluation = load_text("evaluation")
    return evaluation[int(SHARE * len(evaluation)) :]


def trained_model(say: Callable[[str], None] = lambda text: None) -> Path:
    """The model's directory; trained if the cache has none of this file and text."""
    key = hashlib.sha256(Path(__file__).read_bytes() + training_text().encode()).hexdigest()[:16]
    place = cache_dir("test-models") / f"trained-{key}"
    if not place.is_dir():
        making = Path(tempfile.mkdtemp(prefix=".making-", dir=place.parent))
        try:
            train(making, say)
            making.rename(place)
        finally:
            shutil.rmtree(making, ignore_errors=True)
    return place


def train(directory: Path, say: Callable[[str], None]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer()
    save_tokenizer(tokenizer, directory)
    ids = torch.tensor(tokenizer.encode(training_text()).ids)
    say(f"{len(ids)} tokens of text")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **SHAPE))
        fit(model, ids, say)
    model.save_pretrained(directory)


def make_tokenizer() -> Any:
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        training_text().splitlines(keepends=True),
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    return tokenizer


def save_tokenizer(tokenizer: Any, directory: Path) -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "bos_token": "<|end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")


def fit(model: Any, ids: Tensor, say: Callable[[str], None]) -> None:
    """AdamW with a cosine schedule over random windows of ``ids``."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    model.train()
    start = time.monotonic()
    for step in range(STEPS):
        starts = torch.randint(len(ids) - LENGTH, (BATCH,)).tolist()
        batch = torch.stack([ids[i : i + LENGTH] for i in starts])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == STEPS - 1:
            say(f"step {step}: loss {loss.item():.3f}, {time.monotonic() - start:.0f} s")
    model.eval()


def factor(step: int) -> float:
    """Of the learning rate: a linear warm-up, then half a cosine."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP)))


if __name__ == "__main__":
    sys.stdout.write(f"{trained_model(lambda text: print(text, flush=True))}\n")  # noqa: T201
