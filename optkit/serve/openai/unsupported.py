"""Fields without an implementation in the server.

Each is refused with 400 and the name, unless the value has no effect: an answer without the field would not be an
answer to the request. The last fields are unsupported at a single endpoint only. ``HARMLESS`` names known fields
without influence on an answer, with any value.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from optkit.serve.http.errors import unsupported

# Field -> values without effect.
INERT: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "chat_template": (None,),
    "prompt_embeds": (None,),
    "documents": (None, []),
    "prompt_logprobs": (None,),
    "guided_decoding_backend": (None, "auto", "guidance"),
    "structural_tag": (None,),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "grammar": (None,),
    "logits_processors": (None, []),
    "logprob_token_ids": (None,),
    "return_prompt_text": (None, False),
    "return_hidden_states": (None, False),
    "routed_experts_prompt_start": (None, 0),
    "watermarking": (None, False),
    "repetition_detection": (None,),
    "thinking_token_budget": (None, -1),
    "include_reasoning": (None, True),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    "media_io_kwargs": (None, {}),
    "mm_processor_kwargs": (None, {}),
    "kv_transfer_params": (None,),
    "ec_transfer_params": (None,),
    "vllm_xargs": (None, {}),
    "lora_path": (None,),
    "echo": (None, False),
    "top_logprobs": (None, 0),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "chat_template_kwargs": (None, {}),
    "reasoning_effort": (None,),
}

HARMLESS = frozenset(
    [
        "prediction",  # about speed
        *("store", "metadata", "service_tier", "safety_identifier"),  # for the operator of the service
        *(
            "prompt_cache_key",
            "prompt_cache_retention",
            "session_id",
        ),  # for routers; prefixes are found by content
        *("return_token_offsets", "return_mm_kwargs"),  # vLLM reads these at its render endpoints only
        "stream_interval",  # tokens per event; here always 1
    ]
)


def refuse_unsupported(data: dict[str, Any], supported: Container[str]) -> None:
    """Raise ApiError 400 for the first field of ``data`` outside ``supported`` whose value has an effect."""
    for name, inert in INERT.items():
        if name in data and name not in supported and not is_one_of(data[name], inert):
            raise unsupported(name)
    messages = data.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            _refuse_in_message(message)


def is_one_of(value: Any, inert: tuple[Any, ...]) -> bool:
    """True when ``value`` is in ``inert``, type and all: to Python, 1 and True are the same."""
    return any(type(value) is type(known) and value == known for known in inert)


def _refuse_in_message(message: dict[str, Any]) -> None:
    if message.get("role") == "function" or message.get("function_call") is not None:
        raise unsupported("messages", "functions are not supported; use tools")
    parts = message.get("content")
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, dict) and part.get("type") not in ("text", None):
            raise unsupported("messages", "only text content parts are supported")
