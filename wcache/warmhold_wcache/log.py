# SPDX-License-Identifier: Apache-2.0
"""The vault's log: one line per event on stderr, in the same form as all of warmhold's."""

import json
import sys
import time

_LEVELS = ("debug", "info", "warning", "error")


class Log:
    """Writes lines of at least a level, as text or as JSON."""

    def __init__(self, level: str = "info", as_json: bool = False) -> None:
        self._lowest = _LEVELS.index(level)
        self._as_json = as_json

    def info(self, message: str, **fields: object) -> None:
        """Given a constant message and fields, log at INFO."""
        self._write("info", message, fields)

    def warning(self, message: str, **fields: object) -> None:
        """Given a constant message and fields, log at WARNING: degraded, but it goes on."""
        self._write("warning", message, fields)

    def error(self, message: str, **fields: object) -> None:
        """Given a constant message and fields, log at ERROR."""
        self._write("error", message, fields)

    def _write(self, level: str, message: str, fields: dict[str, object]) -> None:
        if _LEVELS.index(level) < self._lowest:
            return
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        head = {"time": stamp, "level": level.upper(), "logger": "warmhold.vault"}
        if self._as_json:
            line = json.dumps({**head, "message": message, **fields}, default=str)
        else:
            pairs = "".join(f" {name}={_text(value)}" for name, value in fields.items())
            line = " ".join(head.values()) + f" {message}{pairs}"
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def _text(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return text if text and text.isprintable() and " " not in text else json.dumps(text)
