# SPDX-License-Identifier: Apache-2.0
"""Documents that are made from code, or name what code has, are not stale."""

import re
from pathlib import Path

import warmhold_entrypoint
import warmhold_snapshot
import warmhold_wcache.errors
from readme_tables import fill_in

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SOURCES = sorted(
    path
    for package in (warmhold_entrypoint, warmhold_snapshot)
    for path in Path(str(package.__file__)).parent.glob("*.py")
)


def test_the_readme_has_the_tables_of_the_code() -> None:
    assert fill_in(README) == README, "run `make tables`"


def test_every_reason_code_is_in_the_readme() -> None:
    code = re.compile(
        r'"((?:settings|arguments|model|memory|shm|port|rights|mode|ready|usage|bug|snapshot'
        r'|ipc_cache)\.[a-z-]*[a-z])"'
    )
    texts = [path.read_text(encoding="utf-8") for path in SOURCES]
    found = {match for text in texts for match in code.findall(text)}
    files = re.compile(r"\.(json|max|events|img)$")
    found = {item for item in found if not files.search(item)}
    found |= {
        f"ipc_cache.{name}" for text in texts for name in re.findall(r'_miss\("([\w-]+)"', text)
    }
    assert len(found) > 20
    documented = set(re.findall(r"`([a-z_]+\.[a-z*-]+)`", README))
    kinds = {entry.removesuffix("*") for entry in documented if entry.endswith("*")}
    missing = {item for item in found - documented if item.split(".")[0] + "." not in kinds}
    assert missing == set()


def test_what_the_vault_can_say_against_its_weights_is_in_the_readme() -> None:
    told = set(re.findall(r"wcache\.([a-z-]+[a-z])", warmhold_wcache.errors.__doc__ or ""))
    assert len(told) > 10
    # Of a drop, and of a preload.
    for name in told - {"in-use", "not-resident"}:
        assert f"`ipc_cache.{name}`" in README, name


def test_every_make_target_of_the_readme_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)):
        assert re.search(rf"^({target}|[a-z -]*\b{target}\b[a-z -]*):", makefile, re.MULTILINE), (
            target
        )


def test_bench_notes_have_a_command_for_every_number() -> None:
    notes = (ROOT / "bench/NOTES.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", notes, flags=re.MULTILINE)[1:]
    assert sections
    for section in sections:
        assert "```" in section, section.splitlines()[0]
