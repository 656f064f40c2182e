"""Requests for the cache, their keys, and the ``cache`` field of a request.

Two requests have the same key if path, tenant and all fields are the same: the fields in any order, everything inside
of a field in the order of the body, because a chat template writes the keys of a tool's schema in their order. So
``cache_salt``, the name of the model, fields without an influence on the answer and unknown fields are parts of the
key, too. Equal keys mean equal answers; different keys may.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from optkit.serve.openai.parsing import checked
from optkit.text.chat_template import ChatTemplate, strftime_now
from optkit.text.template_time import time_formats

FIELD = "cache"
SEEDED = frozenset(["/v1/chat/completions", "/v1/completions"])  # endpoints with a field ``seed``
CHATS = frozenset(
    ["/v1/chat/completions", "/v1/responses", "/v1/messages"]
)  # with prompts of the chat template
POOLING = frozenset(["/v1/embeddings", "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"])
CACHED = SEEDED | CHATS | POOLING
MAX_TTL = 10 * 365 * 86400


class CacheControl(BaseModel):
    """The ``cache`` field of a request.

    Attributes:
        no_cache: compute the answer, and keep the new answer in the place of an older answer.
        no_store: do not keep the answer.
        ttl: seconds to keep the answer; None is until the memory is needed.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    no_cache: Annotated[bool, Field(alias="no-cache")] = False
    no_store: Annotated[bool, Field(alias="no-store")] = False
    ttl: Annotated[float, Field(gt=0, le=MAX_TTL)] | None = None


class _Body(BaseModel):
    cache: CacheControl | None = None


def control_of(data: dict[str, Any]) -> CacheControl:
    """The ``cache`` field of a request; ApiError 400 for a wrong value."""
    if data.get(FIELD) is None:
        return CacheControl()
    return checked(_Body, {FIELD: data[FIELD]}).cache or CacheControl()


def is_deterministic(path: str, data: dict[str, Any], default_temperature: float | None) -> bool:
    """True if the answer to a request follows from its fields alone.

    Args:
        default_temperature: of the model, for requests without; None is OpenAI's 1.
    """
    if path in POOLING:
        return True
    if data.get("ttft_details"):  # times of the one computation
        return False
    if path in SEEDED and data.get("use_beam_search") is True:
        return True
    temperature = data.get("temperature")
    if temperature is None:
        temperature = 1.0 if default_temperature is None else default_temperature
    if type(temperature) in (int, float) and temperature == 0:
        return True
    return path in SEEDED and type(data.get("seed")) is int


class KeyMaker:
    """Keys of requests.

    Args:
        identity: changes with the artifact and the version of optkit.
        template: of the server; with the date or the time in prompts, both are parts of the keys.
    """

    def __init__(self, identity: str, template: ChatTemplate | None) -> None:
        self._identity = identity
        self._formats = time_formats(template) if template else ()

    def key_of(self, path: str, tenant: str, data: dict[str, Any]) -> bytes | None:
        """The key of a request, 32 bytes; None if the prompt does not follow from fields and time.

        Args:
            tenant: name of the API key.
        """
        times: list[str] = []
        if path in CHATS:
            if self._formats is None:
                return None
            times = [strftime_now(pattern) for pattern in self._formats]
        fields = sorted(((name, value) for name, value in data.items() if name != FIELD), key=_name)
        text = json.dumps([self._identity, times, path, tenant, fields], separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()


def _name(field: tuple[str, Any]) -> str:
    return field[0]
