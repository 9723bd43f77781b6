# SPDX-License-Identifier: Apache-2.0
"""The command line: what serves, what is ours, what is executed, and how each fault ends."""

import subprocess
import sys

import pytest
from warmhold_entrypoint import cli, commands
from warmhold_entrypoint.errors import EntrypointError
from warmhold_entrypoint.running import orders


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; from warmhold_entrypoint.cli import main; main()"
    path = ":".join(sys.path)
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_names_of_the_commands_are_known_without_their_parser() -> None:
    assert set(cli.COMMANDS) == set(commands.cli.commands)


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--version"], ["settings"]])
def test_a_command_that_starts_nothing(arguments: list[str]) -> None:
    result = run(*arguments)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout


def test_a_wrong_option_of_a_command() -> None:
    result = run("status", "--no-such")
    assert result.returncode == 2
    assert result.stderr.startswith("error: usage.command: ")


def test_no_runner_answers(tmp_path: object) -> None:
    result = run("status", WARMHOLD_RUN_DIR=str(tmp_path))
    assert result.returncode == 75
    assert "error: ready.no-runner" in result.stderr


@pytest.mark.parametrize("arguments", [[], ["--max-model-len", "5"], ["boot", "--", "--x"]])
def test_what_serves_checks_its_settings_first(arguments: list[str]) -> None:
    result = run(*arguments, WARMHOLD_MODE="fast", WARMHOLD_MODEL="/nowhere")
    assert result.returncode == 78
    assert "error: settings.mode" in result.stderr
    assert "error: model.missing" in result.stderr


def test_the_parser_is_not_imported_on_the_way_to_an_engine() -> None:
    """Its import would delay every start."""
    modules = "warmhold_entrypoint.container.boot, warmhold_entrypoint.running.engine"
    code = f"import sys, {modules}; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    loaded = set(result.stdout.split())
    assert "warmhold_entrypoint.running.engine" in loaded
    assert not {"click", "http.client", "ssl", "torch", "vllm", "yaml"} & loaded


@pytest.mark.parametrize(
    ("code", "create", "restore"),
    [
        ("snapshot.rights", 77, 77),
        ("snapshot.unsupported", 73, 74),
        ("snapshot.dump", 73, 74),
        ("ready.no-runner", 75, 75),
    ],
)
def test_how_a_refused_order_ends(
    code: str, create: int, restore: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = {"ok": False, "code": code, "detail": "why", "remedy": "do"}
    monkeypatch.setattr(orders, "give_order", lambda *_: refusal)
    for command, ends_with in (("snapshot-create", create), ("snapshot-restore", restore)):
        with pytest.raises(EntrypointError) as caught:
            commands.run_command([command])
        assert caught.value.exit_code == ends_with
