"""vLLM's ``speculative_config``: the options of speculation as one JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from optkit.errors import UserError

NAME = "speculative_config"
GUESSERS = ("ngram", "suffix")  # sources of guesses that are no artifacts


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The names of vLLM that have a meaning here; ``model`` is another artifact."""

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int | None = None
    suffix_decoding_max_cached_requests: int | None = None


def with_speculation(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options ``values`` by name, with those of ``speculative_config`` in its place.

    Raises:
        UserError: the object is no JSON, has other names, or has no known method.
    """
    found = dict(values)
    text = found.pop(NAME, None)
    if text is None:
        return found
    try:
        config = msgspec.json.decode(text, type=SpeculativeConfig)
    except (msgspec.DecodeError, TypeError) as error:
        known = ", ".join(SpeculativeConfig.__struct_fields__)
        raise _refusal(str(error).replace("`", ""), f"a JSON object of {known}") from error
    given = {
        "speculative_model": _guesser(config),
        "num_speculative_tokens": config.num_speculative_tokens,
        "speculative_cached_requests": config.suffix_decoding_max_cached_requests,
    }
    return found | {name: value for name, value in given.items() if value is not None}


def _guesser(config: SpeculativeConfig) -> str:
    """The value of ``speculative_model``."""
    method = config.method or ("draft_model" if config.model else None)
    if method in GUESSERS:
        if config.model not in (None, method):
            raise _refusal(f"the method {method} has no model", "leave out model, or use method draft_model")
        return method
    if method == "draft_model" and config.model:
        return config.model
    what = f"unknown method {method!r:.40}"
    if method is None or method == "draft_model":
        what = "no method is given" if method is None else "the method draft_model needs a model"
    raise _refusal(what, "use method ngram or suffix, or draft_model with an artifact as model")


def _refusal(what: str, fix: str) -> UserError:
    return UserError(what, where="--speculative-config", fix=fix)
