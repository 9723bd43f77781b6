# SPDX-License-Identifier: Apache-2.0
"""One line per event on stderr: a constant message first, then key=value.

Text or JSON, UTC. Values never come from secrets: callers redact argv with `redact_argv`.
"""

import json
import logging
import re
import sys
import time
from collections.abc import Mapping, Sequence

from .arguments import is_option

_PLAIN = re.compile(r"[\w.,:/@+%\[\]-]+")
_SECRET_OPTIONS = ("--api-key", "--hf-token", "--seed-token")


class _Formatter(logging.Formatter):
    def stamp(self, record: logging.LogRecord) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))


class _TextFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        pairs = "".join(f" {key}={_text_value(value)}" for key, value in fields.items())
        line = f"{self.stamp(record)} {record.levelname} {record.name} {record.getMessage()}{pairs}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.stamp(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class Log:
    """A named logger whose methods take a constant message and the event's fields."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"warmhold.{name}")

    def debug(self, message: str, **fields: object) -> None:
        """Given a constant message and fields, log at DEBUG."""
        self._logger.debug(message, extra={"fields": fields})

    def info(self, message: str, **fields: object) -> None:
        """Given a constant message and fields, log at INFO."""
        self._logger.info(message, extra={"fields": fields})

    def warning(self, message: str, **fields: object) -> None:
        """Given a constant message and fields, log at WARNING: degraded, but it goes on."""
        self._logger.warning(message, extra={"fields": fields})

    def error(self, message: str, *, exc_info: bool = False, **fields: object) -> None:
        """Given a constant message and fields, log at ERROR."""
        self._logger.error(message, extra={"fields": fields}, exc_info=exc_info)


def configure_logging(environ: Mapping[str, str]) -> None:
    """Given the environment, send all of warmhold's events to stderr in the form it asks for.

    A value that is none is a fault of the settings; here it means the default.
    """
    handler = logging.StreamHandler(sys.stderr)
    as_json = environ.get("WARMHOLD_LOG_FORMAT") == "json"
    handler.setFormatter(_JsonFormatter() if as_json else _TextFormatter())
    level = environ.get("WARMHOLD_LOG_LEVEL", "").upper()
    root = logging.getLogger("warmhold")
    root.handlers = [handler]
    root.setLevel(level if level in ("DEBUG", "INFO", "WARNING", "ERROR") else "INFO")
    root.propagate = False


def redact_argv(argv: Sequence[str]) -> list[str]:
    """Given an argv, return a copy in which the values of secret options read `***`.

    `--api-key` takes one or more values: all up to the next option are hidden.
    """
    shown: list[str] = []
    hiding = False
    for argument in argv:
        name, equals, _ = argument.partition("=")
        secret = _may_be_secret(name.replace("_", "-"))
        if is_option(argument):
            hiding = secret and not equals
            shown.append(f"{name}=***" if secret and equals else argument)
        else:
            shown.append("***" if hiding else argument)
    return shown


def _may_be_secret(name: str) -> bool:
    """Whether vLLM may take it for a secret option, of which the beginning is enough."""
    found = any(option.startswith(name) for option in _SECRET_OPTIONS)
    return found and len(name) > len("--") and name != "--seed"


def _text_value(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
