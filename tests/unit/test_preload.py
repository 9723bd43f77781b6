# SPDX-License-Identifier: Apache-2.0
"""A preload: what it runs, as whom, past what, and when all weights count as resident."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from stack import write_model
from vault_process import command, running_vault
from warmhold_entrypoint.errors import EntrypointError
from warmhold_entrypoint.start import make_sound_plan, write_command
from warmhold_entrypoint.weight_cache import preload
from warmhold_wcache.errors import WcacheError
from warmhold_wcache.vllm_plugin import preload as plugin
from warmhold_wcache.vllm_plugin.outcome import Outcome, write_outcome


class ExecError(BaseException):
    """Stands for the end of this program."""


@pytest.fixture
def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict]]:
    """What is executed, and with which environment; a container whose model is at `model`."""
    found: list[tuple[list[str], dict[str, str]]] = []

    def execve(path: str, argv: list[str], environment: dict[str, str]) -> None:
        found.append((argv, environment))
        raise ExecError

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setenv("WARMHOLD_MODEL", str(write_model(tmp_path / "model")))
    monkeypatch.setenv("WARMHOLD_WCACHE", "vault")
    monkeypatch.setenv("WARMHOLD_API_KEY", "hush")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    for name in ("state", "models", "run"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(f"WARMHOLD_{name.upper()}_DIR", str(tmp_path / name))
    return found


def serve_vault(folder: Path):
    """A vault where the container's would be."""
    path = folder / "run" / "wcache.sock"
    path.unlink(missing_ok=True)
    path.symlink_to(folder / "vault.sock")
    return running_vault(folder)


# The command


def test_it_runs_the_plans_arguments_as_the_engine_and_unmarked(
    tmp_path: Path, executed: list[tuple[list[str], dict[str, str]]]
) -> None:
    with serve_vault(tmp_path), pytest.raises(ExecError):
        preload.run_preload(["--max-model-len", "512", "-tp", "2"])
    ((argv, environment),) = executed
    start = argv.index("none")
    assert argv[start - 3 : start][0] == "-S"
    assert (argv[start - 2].endswith("launcher.py"), argv[start - 1]) == (True, str(os.getuid()))
    assert argv[start + 1 : start + 4] == [sys.executable, "-m", plugin.__name__]
    assert argv[start + 4 : start + 9] == [
        str(tmp_path / "model"),
        *("--max-model-len", "512", "-tp", "2"),
    ]
    loader = json.loads(argv[-1])
    assert argv[-4:-1] == ["--load-format", "warmhold", "--model-loader-extra-config"]
    assert loader["socket_path"] == str(tmp_path / "run" / "wcache.sock")
    assert loader["launch_key"]["argument.max-model-len"] == "512"
    assert "file" not in loader
    assert "WARMHOLD_MODE" not in environment
    assert (environment["VLLM_LOGGING_LEVEL"], environment["HF_HUB_OFFLINE"]) == ("INFO", "1")
    assert environment["VLLM_CACHE_ROOT"].startswith(str(tmp_path / "state"))
    assert "hush" not in [*argv, *environment.values()]


def test_without_arguments_it_loads_what_the_container_serves(
    tmp_path: Path, executed: list[tuple[list[str], dict[str, str]]]
) -> None:
    write_command(tmp_path / "run", ["--dtype", "bfloat16"])
    with serve_vault(tmp_path), pytest.raises(ExecError):
        preload.run_preload([])
    assert "--dtype bfloat16" in " ".join(executed[0][0])


def test_a_model_may_come_first(
    tmp_path: Path, executed: list[tuple[list[str], dict[str, str]]]
) -> None:
    other = write_model(tmp_path / "other")
    write_command(tmp_path / "run", ["--dtype", "bfloat16"])
    with serve_vault(tmp_path), pytest.raises(ExecError):
        preload.run_preload([str(other), "--seed", "7"])
    argv = executed[0][0]
    assert argv[argv.index(plugin.__name__) + 1 :][:3] == [str(other), "--seed", "7"]
    assert "--dtype" not in argv


@pytest.mark.parametrize("mode", ["auto", "ipc_cache"])
def test_neither_a_port_that_is_taken_nor_an_empty_vault_stops_it(
    tmp_path: Path,
    executed: list[tuple[list[str], dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    monkeypatch.setenv("WARMHOLD_MODE", mode)
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        arguments = ["--port", str(holder.getsockname()[1])]
        with pytest.raises(EntrypointError, match=r"port\.taken"):
            make_sound_plan(arguments)
        with serve_vault(tmp_path), pytest.raises(ExecError):
            preload.run_preload(arguments)
    assert len(executed) == 1


def test_other_faults_do(tmp_path: Path, executed: list[object]) -> None:
    with serve_vault(tmp_path), pytest.raises(EntrypointError, match=r"model\.missing"):
        preload.run_preload(["/nowhere"])
    assert executed == []


def test_without_a_vault_nothing_is_loaded(
    executed: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EntrypointError, match=r"wcache\.unreachable: wcache\.absent") as caught:
        preload.run_preload([])
    assert caught.value.exit_code == 69
    monkeypatch.setenv("WARMHOLD_WCACHE", "off")
    with pytest.raises(EntrypointError, match=r"mode\.unavailable: ipc_cache\.off") as caught:
        preload.run_preload([])
    assert caught.value.exit_code == 69
    assert executed == []


@pytest.mark.parametrize("name", ["runai_streamer", "dummy"])
def test_what_would_not_be_published_is_not_loaded(
    tmp_path: Path, executed: list[object], name: str
) -> None:
    with serve_vault(tmp_path), pytest.raises(EntrypointError, match=r"ipc_cache\.unsupported"):
        preload.run_preload(["--load-format", name])
    assert executed == []


def test_the_users_own_loader_options_stay(
    tmp_path: Path, executed: list[tuple[list[str], dict[str, str]]]
) -> None:
    own = {"socket_dir": "/own", "segment_bytes": 1 << 21}
    for extra in ({"file": "/own.json"}, own):
        with serve_vault(tmp_path), pytest.raises(ExecError):
            preload.run_preload(["--model-loader-extra-config", json.dumps(extra)])
    first, second = (json.loads(argv[-1]) for argv, _ in executed)
    assert first["file"] == "/own.json"
    assert own.items() <= second.items()
    assert "socket_path" not in second


def test_wcache_hands_it_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "warmhold"
    program.write_text('#!/bin/sh\necho "$@"\nexit 7\n')
    program.chmod(0o755)
    argv = [sys.executable, "-m", "warmhold_wcache.cli", "preload", "org/name", "-tp", "2", "--x=y"]
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "preload org/name -tp 2 --x=y\n")
    monkeypatch.setenv("PATH", "/nowhere")
    code, text = command(tmp_path / "none", "preload")
    assert (code, "wcache.unsupported" in text) == (1, True)


# The load


def test_options_for_the_load() -> None:
    asked = {"file": "/run/loader.json", "source": "disk", "mode": "copy", "release": True}
    load_format, extra = plugin.choose_loader("warmhold", asked, Path("/reports"))
    assert load_format == "warmhold"
    assert extra == {
        **{"file": "/run/loader.json", "source": "auto", "mode": "zero_copy", "release": False},
        **{"fallback": True, "report": "/reports"},
    }
    assert plugin.choose_loader("auto", None, Path("/r"))[0] == "warmhold"
    assert plugin.choose_loader("ipc_cache", '{"a": 1}', Path("/r"))[1]["a"] == 1
    with pytest.raises(WcacheError, match="the load format runai_streamer does not ask the vault"):
        plugin.choose_loader("runai_streamer", {}, Path("/r"))


def report(pid: int, **fields: object) -> dict[str, object]:
    return {**Outcome().to_json(), "pid": pid, **fields}


def test_every_rank_has_to_be_resident() -> None:
    published, hit = report(1, published="a"), report(2, generation="b", mode="ipc_cache")
    assert plugin.find_failures([published, hit], 2) == []
    assert plugin.find_failures([published], 2) == [
        "1 of 2 rank(s) loaded without the vault's loader"
    ]
    refused = report(2, not_published="the vault is full")
    assert plugin.find_failures([published, refused], 2) == ["the vault is full (PID 2)"]
    unable = report(2, code="wcache.unsupported", reason="experts are moved")
    assert plugin.find_failures([published, unable], 2) == ["experts are moved (PID 2)"]
    # A draft model of the same rank does not stand for another rank.
    assert len(plugin.find_failures([published, report(1, published="draft")], 2)) == 1
    assert plugin.find_failures([published, report(1)], 1) == ["nothing was published (PID 1)"]


def test_a_second_load_of_a_process_does_not_replace_the_first_report(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path;"
        "from warmhold_wcache.vllm_plugin.outcome import Outcome, write_outcome;"
        "[write_outcome(Outcome(published=name), Path(sys.argv[1])) for name in 'ab']"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environment) as process:
        pass
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"weights-{process.pid}-{number}.json" for number in (1, 2)]
    assert [item["published"] for item in plugin.read_reports(tmp_path)] == ["a", "b"]


def fake_load(outcomes: list[Outcome], ranks: int):
    def load(argv: list[str], folder: Path) -> int:
        for outcome in outcomes:
            write_outcome(outcome, folder)
        return ranks

    return load


def test_it_ends_with_0_when_all_is_resident(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = [Outcome(published="a1"), Outcome(generation="b2")]
    monkeypatch.setattr(plugin, "load", fake_load(outcomes, 1))
    assert plugin.main() == 0
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == ["a1 published", "b2 was resident already"]
    assert shown.err == ""


def test_it_ends_with_1_and_the_reason_when_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = [Outcome(published="a1"), Outcome(unpublished="the vault is full")]
    monkeypatch.setattr(plugin, "load", fake_load(outcomes, 1))
    assert plugin.main() == 1
    shown = capsys.readouterr()
    assert shown.out == "a1 published\n"
    assert shown.err.startswith("error: wcache.not-resident: the vault is full (PID ")
