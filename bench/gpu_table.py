# SPDX-License-Identifier: Apache-2.0
"""A table that fills row by row and goes on where it was left: what is in its file is not measured
again, and every value is written as soon as it is known."""

import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Table:
    """Rows by name, each a list of values, in a JSON file; threads may share it. No value is
    measured any more once `limit_s` have passed: what is left is for the next run."""

    def __init__(self, path: Path, limit_s: float = float("inf")) -> None:
        self.path, self._limit_s = path, limit_s
        self.rows: dict[str, list[Any]] = {}
        self.failures: list[str] = []
        self._began, self._writing = time.monotonic(), threading.Lock()
        if path.exists():
            self.rows = json.loads(path.read_text())["rows"]
            self.say(f"{len(self.rows)} rows are kept")

    def lacks(self, name: str, count: int = 1) -> int:
        """Given a row and how many values it should have, return how many are missing."""
        return max(0, count - len(self.rows.get(name, [])))

    def fill(self, name: str, count: int, measure: Callable[[], Any]) -> None:
        """Given a row, how many values it should have and how one is measured, measure those that
        are missing. What a measurement raises is told, and ends the row."""
        for _ in range(self.lacks(name, count)):
            if self.is_over():
                self.say(f"left for the next run: {name}")
            if self.is_over() or not self.measure(name, measure):
                return

    def measure(self, name: str, measure: Callable[[], Any]) -> bool:
        """Given a row and how a value is measured, add one; tell whether that went well."""
        try:
            self.add(name, measure())
        except Exception as error:
            text = f"{name}: {type(error).__name__}: {error}"[-6000:]
            self.failures.append(text)
            self.say(f"FAILED {text}")
            return False
        return True

    def is_over(self) -> bool:
        """Whether the limit has passed."""
        return time.monotonic() - self._began > self._limit_s

    def add(self, name: str, value: Any) -> None:
        """Add a value to a row, and write the table."""
        with self._writing:
            self.rows.setdefault(name, []).append(value)
            text = json.dumps({"rows": self.rows, "failures": self.failures}, indent=1)
            new = self.path.with_suffix(".new")
            new.write_text(text)
            new.replace(self.path)
        self.say(f"{name}: {json.dumps(value)}")

    def say(self, text: str) -> None:
        """Print a line with the seconds since the beginning."""
        print(f"[{time.monotonic() - self._began:6.1f}] {text}", flush=True)

    def summarise(self, key: str) -> None:
        """Print every row's median of the number of that name, and its single values."""
        for name, values in self.rows.items():
            numbers = [value[key] for value in values if isinstance(value, dict) and key in value]
            if numbers:
                single = ", ".join(f"{number:.2f}" for number in numbers)
                self.say(f"{name:32} {statistics.median(numbers):8.2f}   ({single})")
