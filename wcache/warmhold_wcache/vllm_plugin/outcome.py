# SPDX-License-Identifier: Apache-2.0
"""What one load did: told in one line of the log, and in a file where the launcher asks for it."""

import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from warmhold_wcache.generation import Generation

_NUMBERS = itertools.count(1)


@dataclass
class Outcome:
    """Filled in while loading; times in seconds per phase."""

    cpu_linear: str = ""
    mode: str = "disk"
    size_bytes: int = 0
    code: str = ""
    reason: str = ""
    fields: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    generation: str = ""
    published: str = ""
    publishes: bool = True
    unpublished: str = ""
    warn: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def hit(self, generation: Generation) -> None:
        """The weights are the vault's."""
        self.mode = "ipc_cache"
        self.generation = generation.id
        self.size_bytes = generation.size_bytes

    def miss(
        self,
        code: str,
        reason: str,
        fields: Mapping[str, tuple[Any, Any]] | None = None,
        warn: bool = False,
    ) -> None:
        """Why the vault's weights were not used, with the fields of the key that differ."""
        self.code, self.reason, self.fields = code, reason, fields or {}
        self.warn = self.warn or warn

    def not_published(self, reason: str, warn: bool = False) -> None:
        """Why the next start will not find these weights."""
        self.unpublished = reason
        self.warn = self.warn or warn

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = time.monotonic() - start

    def text(self) -> str:
        """The line's `key=value` part."""
        words = [f"mode={self.mode}", f"bytes={self.size_bytes}"]
        words += [f"{name}_s={value:.3f}" for name, value in self.seconds.items()]
        words += [f"cpu_linear={self.cpu_linear}"] if self.cpu_linear else []
        if self.generation:
            words.append(f"generation={self.generation}")
        if self.published:
            words.append(f"published={self.published}")
        if self.code:
            words.append(f"code={self.code} reason={json.dumps(self.reason)}")
        if self.fields:
            words.append(f"fields={','.join(sorted(self.fields))}")
        if self.unpublished:
            words.append(f"not_published={json.dumps(self.unpublished)}")
        return " ".join(words)

    def to_json(self) -> dict[str, Any]:
        """The outcome as JSON values."""
        return {
            "mode": self.mode,
            "bytes": self.size_bytes,
            "seconds": {name: round(value, 4) for name, value in self.seconds.items()},
            "cpu_linear": self.cpu_linear,
            "code": self.code,
            "reason": self.reason,
            "fields": {name: list(pair) for name, pair in self.fields.items()},
            "generation": self.generation,
            "published": self.published,
            "not_published": self.unpublished,
            "pid": os.getpid(),
        }


def write_outcome(outcome: Outcome, folder: Path | None) -> None:
    """Given an outcome and a folder, write it there as `weights-PID-N.json`, N counting
    the models of a process; a failure costs no start."""
    if folder is None:
        return
    with suppress(OSError):
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            json.dump(outcome.to_json(), file)
        Path(temporary).replace(folder / f"weights-{os.getpid()}-{next(_NUMBERS)}.json")
