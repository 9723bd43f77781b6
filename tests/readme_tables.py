# SPDX-License-Identifier: Apache-2.0
"""Writes the README's tables of settings and exit codes from the code that has them.

python tests/readme_tables.py    # `make tables`; a test fails while the README is stale
"""

import re
from pathlib import Path

from warmhold_entrypoint.errors import EXIT_MEANING
from warmhold_entrypoint.settings import settings_table

README = Path(__file__).resolve().parents[1] / "README.md"


def build_tables() -> dict[str, str]:
    """Return each table's Markdown by the name of its marks in the README."""
    settings = ["| variable | default | meaning |", "|---|---|---|"]
    settings += [f"| `{name}` | `{default}` | {text} |" for name, default, text in settings_table()]
    exits = ["| code | meaning |", "|---|---|"]
    exits += [f"| {int(code)} | {meaning} |" for code, meaning in EXIT_MEANING.items()]
    exits.append("| 128+n | signal n ended the engine |")
    return {"settings": "\n".join(settings), "exits": "\n".join(exits)}


def fill_in(readme: str) -> str:
    """Given the README, return it with every table as the code has it."""
    for name, table in build_tables().items():
        marks = re.compile(rf"(<!-- {name}: .*? -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        readme, count = marks.subn(
            lambda match, text=table: f"{match[1]}{text}\n{match[2]}", readme
        )
        if count != 1:
            raise ValueError(f"the README has {count} places for {name}")
    return readme


if __name__ == "__main__":
    README.write_text(fill_in(README.read_text(encoding="utf-8")), encoding="utf-8")
