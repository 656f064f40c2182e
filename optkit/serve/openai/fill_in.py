"""Fill in the middle: ``prompt`` and ``suffix`` as a single prompt, for models with special tokens for the task.

The model reads the texts before and after a gap between special tokens and then writes the gap: prefix token, prompt,
suffix token, suffix, middle token (Bavarian et al. 2022). The names of the tokens differ; a vocabulary without any of
these names means a model without the skill.
"""

from __future__ import annotations

from optkit.serve.http.errors import ApiError
from optkit.text.tokenizer import Tokenizer

NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, StarCoder 2
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
)


def gap_prompt(tokenizer: Tokenizer, before: str, after: str) -> str:
    """The prompt for the text between ``before`` and ``after``.

    Raises:
        ApiError: 400, the model was not trained to fill in.
    """
    for prefix, suffix, middle in NAMES:
        if None not in (tokenizer.token_id(prefix), tokenizer.token_id(suffix), tokenizer.token_id(middle)):
            return f"{prefix}{before}{suffix}{after}{middle}"
    message = "this model's vocabulary has no tokens for filling in the middle"
    raise ApiError(message, param="suffix", code="unsupported_parameter")
