"""A tiny byte-level tokenizer with a chat template, trained in place. No import of torch, which costs seconds."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from optkit.text.chat_template import ChatTemplate
from optkit.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = "Hello there, how are you doing today? The end is near."
CORPUS = [TEXT, "the cat sat on the mat and the dog ran to the cat", "hello hello hello"] * 4


@cache
def fast_tokenizer() -> FastTokenizer:
    """Byte-level BPE over all 256 bytes, with a few dozen merges and two special tokens."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    fast.train_from_iterator(CORPUS, trainer)
    fast.add_special_tokens([AddedToken(word, special=True) for word in ("<|im_start|>", "<|im_end|>")])
    return fast


def tiny_tokenizer() -> Tokenizer:
    """optkit's ``Tokenizer`` with ``fast_tokenizer`` and a chat template."""
    return Tokenizer(
        fast_tokenizer(), ChatTemplate(TEMPLATE), eos_ids=[fast_tokenizer().token_to_id("<|im_end|>")]
    )
