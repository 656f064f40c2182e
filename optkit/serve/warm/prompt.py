"""The stable tokens of a warm call: equal in all requests to come.

- A conversation with a turn of the user or of a tool at the end is taken whole: the same messages follow in a
  request, generation prompt included.
- After a system message or an answer another turn follows, whose text is not known.
- A text, and the last message of a ``session``, may grow.
"""

from __future__ import annotations

from collections.abc import Sequence

from optkit.serve.http.errors import ApiError
from optkit.serve.openai.prompts import PromptReader, overflow
from optkit.serve.openai.protocol import Message
from optkit.serve.warm.protocol import WarmChat, WarmRequest, param_of
from optkit.text.stable_prefix import common_prefix, endings, stable_prefix

NEXT_TURNS = ("a", "1")
COMPLETE_ROLES = ("user", "tool")


async def stable_ids(prompts: PromptReader, request: WarmRequest) -> list[int]:
    """Token ids at the beginning of every prompt after ``request``.

    Raises:
        ApiError: 400, a wrong prompt, or a prompt too long for the context.
    """
    if isinstance(request, WarmChat):
        found = await _chat_ids(prompts, request)
    elif isinstance(request.prompt, str):
        texts = endings(request.prompt)
        found = stable_prefix(await prompts.ids_of_each(texts, "prompt", request.add_special_tokens))
    else:
        prompts.check_ids("prompt", request.prompt)
        found = request.prompt
    if len(found) >= prompts.max_model_len:
        raise overflow(prompts.max_model_len, param_of(request), len(found))
    return found


async def _chat_ids(prompts: PromptReader, request: WarmChat) -> list[int]:
    last = request.messages[-1]
    if request.session:
        ends = [last.model_copy(update={"content": text}) for text in endings(last.content)]
        grown = [[*request.messages[:-1], end] for end in ends]
        return stable_prefix(await _ids_of_each(prompts, request, grown))
    if last.role in COMPLETE_ROLES or request.continue_final_message:
        return common_prefix(await _ids_of_each(prompts, request, [request.messages]))
    turns = [Message(role="user", content=text) for text in NEXT_TURNS]
    return common_prefix(await _ids_of_each(prompts, request, [[*request.messages, turn] for turn in turns]))


async def _ids_of_each(
    prompts: PromptReader, request: WarmChat, conversations: Sequence[list[Message]]
) -> list[list[int]]:
    """Token ids of ``request`` with each of ``conversations``."""
    copies = [request.model_copy(update={"messages": messages}) for messages in conversations]
    texts = [await prompts.render(copy) for copy in copies]
    return await prompts.ids_of_each(texts, "messages", bool(request.add_special_tokens))


def refuse_empty(request: WarmRequest, num_tokens: int, block_size: int) -> None:
    """Refuse to pin a prompt without a full block.

    Raises:
        ApiError: 400.
    """
    if request.pin and num_tokens < block_size:
        message = f"the prompt has {num_tokens} tokens that stay the same, and the KV cache shares blocks of "
        message += f"{block_size} tokens: there is nothing to pin"
        raise ApiError(message, param=param_of(request), code="prompt_too_short")
