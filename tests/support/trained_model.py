"""A small Llama with trained weights, to compare quantizers beside the embedded model.

Random weights have no structure for calibration, and the embedded model's weights lie on a 4-bit grid already. The
small model is trained on the shipped text, in minutes on two cores, with a byte-level BPE tokenizer trained on the
same text. The last part of the evaluation text (``held_out``) is kept from both. The result is a poor language model
with realistic weights: float32, correlated, of very different importance.

optkit's cache directory keeps the model under a hash of the module's source and the text, so a machine trains only
once.

``python -m tests.support.trained_model`` trains the model and prints the progress.
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
    """The shipped text without ``held_out``."""
    evaluation = load_text("evaluation")
    return load_text("calibration") + evaluation[: int(SHARE * len(evaluation))]


def held_out() -> str:
    """Text unseen by the model and its tokenizer."""
    evaluation = load_text("evaluation")
    return evaluation[int(SHARE * len(evaluation)) :]


def trained_model(say: Callable[[str], None] = lambda text: None) -> Path:
    """The model's directory; trains the model if the cache has none."""
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
    """Train the tokenizer and the model and write both to ``directory``."""
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
    """A byte-level BPE tokenizer trained on ``training_text``."""
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
    """Write the tokenizer to ``directory`` in the layout of transformers."""
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
    """Factor of the learning rate: a linear warm-up, then half a cosine."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP)))


if __name__ == "__main__":
    sys.stdout.write(f"{trained_model(lambda text: print(text, flush=True))}\n")  # noqa: T201
