# SPDX-License-Identifier: Apache-2.0
"""From faults to exit codes."""

import ast
from pathlib import Path

import pytest
import warmhold_entrypoint
from warmhold_entrypoint.errors import (
    EXIT_MEANING,
    EntrypointError,
    Exit,
    Fault,
    exit_code_of_status,
)

SOURCES = sorted(Path(warmhold_entrypoint.__file__).parent.rglob("*.py"))
# These never end a command by their own kind: the first is for bugs, the second has the engine's.
WITHOUT_A_KIND = {"bug", "engine"}


def written_codes() -> set[str]:
    """Every code that stands in the package, up to its first placeholder."""
    codes = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Fault" and node.args:
                first = node.args[0]
                part = first.values[0] if isinstance(first, ast.JoinedStr) else first
                assert isinstance(part, ast.Constant), f"{path.name}:{node.lineno}"
                codes.add(part.value)
    return codes


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("settings.mode", 78),
        ("arguments.json", 78),
        ("model.missing", 78),
        ("memory.too-small", 78),
        ("shm.too-small", 78),
        ("port.taken", 78),
        ("rights.not-writable", 77),
        ("mode.unavailable", 69),
        ("ready.no-runner", 75),
        ("usage.command", 2),
        ("bug.unexpected", 70),
        ("modest.x", 70),
    ],
)
def test_the_kind_decides_the_exit_code(code: str, exit_code: int) -> None:
    assert Fault(code, "", "").exit_code == exit_code


def test_every_code_in_the_package_has_a_kind() -> None:
    codes = written_codes()
    assert {"model.missing", "memory.too-small", "settings."} <= codes
    unknown = {code for code in codes if Fault(code, "", "").exit_code is Exit.BUG}
    assert {code.partition(".")[0] for code in unknown} <= WITHOUT_A_KIND


def test_every_exit_code_has_a_meaning() -> None:
    assert set(EXIT_MEANING) == set(Exit)
    assert len(set(EXIT_MEANING.values())) == len(Exit)


def test_a_user_sees_two_lines() -> None:
    assert Fault("a.b", "was", "do").lines() == "error: a.b: was\nfix: do"


def test_several_faults_end_with_the_first_ones_code() -> None:
    error = EntrypointError(iter([Fault("rights.x", "a", ""), Fault("settings.y", "b", "")]))
    assert error.exit_code == Exit.RIGHTS
    assert str(error) == "rights.x: a; settings.y: b"
    assert [fault.code for fault in error.faults] == ["rights.x", "settings.y"]


@pytest.mark.parametrize(("status", "code"), [(0, 1), (1, 1), (3, 3), (255, 255), (-9, 137)])
def test_status_of_an_engine_that_ended_unasked(status: int, code: int) -> None:
    assert exit_code_of_status(status) == code
