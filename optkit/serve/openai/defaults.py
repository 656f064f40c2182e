"""Sampling defaults of a model: the recommendations of ``generation_config.json``, for fields absent in a request.

Model authors publish their settings in this file. As in vLLM, the server takes over the fields below; a request's own
fields come first, and ``--generation-config none`` keeps OpenAI's defaults.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from optkit.serve.http.errors import printable

log = logging.getLogger("optkit.serve")

FILE = "generation_config.json"
MAX_BYTES = 1 << 20


class SamplingDefaults(msgspec.Struct, frozen=True):
    """Values for absent fields of a request; None is OpenAI's default. The bounds are the same as for requests."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None

    @property
    def given(self) -> dict[str, float]:
        """The fields with a value."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


def read_defaults(directory: Path) -> SamplingDefaults:
    """The defaults of the model in ``directory``; a value out of bounds is left out, with a line in the log."""
    file = directory / FILE
    if not file.is_file() or file.stat().st_size > MAX_BYTES:
        return SamplingDefaults()
    try:
        data = msgspec.json.decode(file.read_bytes(), type=dict)
    except msgspec.MsgspecError:
        log.warning("%s is not a JSON object; its sampling defaults are not used", FILE)
        return SamplingDefaults()
    found = {}
    for name in SamplingDefaults.__struct_fields__:
        try:
            checked = msgspec.convert({name: data.get(name)}, SamplingDefaults)
        except msgspec.ValidationError as error:
            log.warning("%s: '%s' is not used: %s", FILE, name, printable(str(error)))
            continue
        found[name] = getattr(checked, name)
    return SamplingDefaults(**found)
