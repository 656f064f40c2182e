"""Log lines of a server, for people or for programs.

``text``: level, logger, message. ``json``: an object a line with ``time`` (RFC 3339, UTC), ``level``, ``logger``,
``message``, and the fields of a record's ``event``. Prompts, answers and keys are never logged: callers log counts,
ids and times, and pass text from clients through ``printable``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime

FORMAT_VARIABLE = "OPTKIT_LOG_FORMAT"  # environment variable, read by the engine process
FORMATS = ("text", "json")


class TextFormatter(logging.Formatter):
    """``INFO optkit.serve: request status=200 ...``; the fields of ``event`` follow the message."""

    def __init__(self, source: str | None = None) -> None:
        super().__init__(f"%(levelname)s {source or '%(name)s'}: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        event = getattr(record, "event", None) or {}
        return super().format(record) + "".join(f" {name}={value}" for name, value in event.items())


class JsonFormatter(logging.Formatter):
    """One JSON object a line; a stack trace is the field ``trace``."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
            **(getattr(record, "event", None) or {}),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def silence_progress_bars() -> None:
    """Turn off the progress bars of other libraries if standard error is no terminal.

    Call this function before importing huggingface_hub, transformers or tqdm, since the import reads the environment
    variables. A value set by the user stays.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # for huggingface_hub and transformers
        os.environ.setdefault("TQDM_DISABLE", "1")  # for all other users of tqdm


def configure(log_format: str | None = None, source: str | None = None) -> None:
    """Log to standard error from level INFO on.

    Args:
        log_format: ``text`` or ``json``, passed on to child processes; by default the value of FORMAT_VARIABLE.
        source: a name for text lines, in place of the logger's name.
    """
    if log_format is not None:
        os.environ[FORMAT_VARIABLE] = log_format
    handler = logging.StreamHandler()
    is_json = os.environ.get(FORMAT_VARIABLE) == "json"
    handler.setFormatter(JsonFormatter() if is_json else TextFormatter(source))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
