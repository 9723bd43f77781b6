# SPDX-License-Identifier: Apache-2.0
"""Process-tree behaviour in depth: the real PID 1, supervisord and runner, a small engine tree."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stack import ROOT, Stack, eventually, free_port, write_model

MakeStack = Callable[..., Stack]
NASTY = ["100%", 'say "hi"', "it's", "$HOME", "a\nb", '{"x": [1, "%d"]}', " ; # ", ""]


def bad_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.search(r"\b(WARN\w*|ERROR|CRIT\w*)\b", line)]


def test_a_healthy_boot_says_so_once_and_nothing_else(make_stack: MakeStack) -> None:
    stack = make_stack().serve()
    text = stack.text()
    assert text.count("READY") == 1
    assert bad_lines(text) == []
    assert text.index("settings mode=auto") < text.index("mode rejected") < text.index("READY")
    assert "code=snapshot.absent" in text
    assert "code=ipc_cache." in text
    assert "unaccounted_s=" in text
    status = stack.wait_ready()
    assert (status["mode"], status["state"], status["crashes"]) == ("disk", "SERVING", 0)
    assert abs(sum(status["phases"].values()) - status["total_s"]) < 1e-6
    assert stack.run("healthcheck").returncode == 0
    assert stack.run("healthcheck", "--live").returncode == 0
    assert stack.stop() == 0
    assert stack.shm_files() == set()


def test_arguments_arrive_byte_exact_from_command_and_variable(make_stack: MakeStack) -> None:
    import shlex

    from_variable = shlex.join(f"--note={item}" for item in NASTY)
    stack = make_stack(WARMHOLD_ENGINE_ARGS=from_variable)
    stack.serve(*(word for item in NASTY for word in ("--note", item)))
    argv = json.loads(re.search(r"^argv (.*)$", stack.text(), re.M)[1])  # type: ignore[index]
    assert [argv[i + 1] for i, word in enumerate(argv) if word == "--note"] == NASTY
    notes = [word.removeprefix("--note=") for word in argv if word.startswith("--note=")]
    assert notes == NASTY


def test_restart_waits_until_the_new_engine_serves(make_stack: MakeStack) -> None:
    stack = make_stack().serve()
    before = stack.tree()
    result = stack.supervisorctl("restart", "engine")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ready in mode ipc_cache" in result.stdout
    status = stack.status()
    assert status
    assert (status["ready"], status["starts"], status["crashes"]) == (True, 2, 0)
    after = stack.tree()
    assert len(after) == 3
    assert not set(before) & set(after)
    assert len(stack.shm_files()) == 1


def test_restart_of_an_engine_that_never_serves_is_an_error(make_stack: MakeStack) -> None:
    stack = make_stack(WARMHOLD_MAX_FAILURES="2").serve()
    stack.engine_exit.write_text("3")
    result = stack.supervisorctl("restart", "engine")
    assert result.returncode != 0
    assert "ERROR" in result.stdout
    assert stack.wait() == 3
    # Two rounds, each in every mode that its plan has.
    assert stack.text().count("new=WAITING") == 1
    assert 2 <= stack.text().count("engine ended unasked") <= 2 * 2


@pytest.mark.parametrize("victim", ["front", "core", "worker", "runner"])
def test_one_tree_after_kill(make_stack: MakeStack, victim: str) -> None:
    stack = make_stack().serve()
    for round_ in range(2):
        old = set(stack.tree())
        pid = stack.runner if victim == "runner" else stack.roles()[victim]
        os.kill(pid, signal.SIGKILL)
        status = stack.wait_ready(starts=round_ + 2)
        new = set(stack.tree())
        assert len(new) == 3
        assert not old & new
        assert len(stack.shm_files()) == 1
        assert status["crashes"] == round_ + 1
        assert status["last_exit"]["code"] != 0
    assert stack.stop() == 0
    assert stack.tree() == {}
    assert stack.shm_files() == set()


def test_an_engine_that_ends_with_0_unasked_has_failed(make_stack: MakeStack) -> None:
    stack = make_stack(WARMHOLD_MAX_FAILURES="2")
    stack.engine_exit.write_text("0")
    stack.boot()
    assert stack.wait() == 1
    assert stack.text().count("engine starting") == 2
    assert "giving up" in stack.text()


@pytest.mark.parametrize("code", [2, 126])
def test_a_hopeless_start_is_not_tried_again(make_stack: MakeStack, code: int) -> None:
    stack = make_stack()
    stack.engine_exit.write_text(str(code))
    stack.boot()
    assert stack.wait() == code
    assert stack.text().count("engine starting") == 1


def test_vllm_refuses_a_flag(make_stack: MakeStack) -> None:
    stack = make_stack().boot("--no-such-flag")
    assert stack.wait() == 2
    assert stack.text().count("engine starting") == 1


def test_stop_lets_the_request_in_flight_finish(make_stack: MakeStack) -> None:
    stack = make_stack(FAKE_VLLM_DRAIN_S="2", FAKE_VLLM_TOKEN_S="1").serve()
    answers: list[Any] = []
    client = threading.Thread(target=lambda: answers.append(stack.complete()))
    client.start()
    eventually(lambda: _established(stack.port), "the request's connection")
    assert stack.stop() == 0
    client.join()
    assert answers[0]["choices"][0]["text"] == " Paris"
    assert stack.tree() == {}


def _established(port: int) -> bool:
    table = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return any(
        line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "01" for line in table
    )


def test_an_engine_that_ignores_the_drain_is_killed(make_stack: MakeStack) -> None:
    stack = make_stack(FAKE_VLLM_DRAIN_S="3600", WARMHOLD_DRAIN_S="0").serve()
    assert stack.stop() == 0
    assert "drain time is over" in stack.text()
    assert stack.tree() == {}


def test_supervisorctl_stop_is_no_failure_and_start_comes_back(make_stack: MakeStack) -> None:
    stack = make_stack().serve()
    assert stack.supervisorctl("stop", "engine").returncode == 0
    assert stack.tree() == {}
    health = stack.run("healthcheck")
    assert health.returncode == 1
    assert "no answer" in health.stdout
    assert stack.run("healthcheck", "--live").returncode == 0
    assert stack.alive()
    assert stack.supervisorctl("start", "engine").returncode == 0
    status = stack.wait_ready(starts=2)
    assert status["crashes"] == 0


def test_a_stopped_core_is_degraded_and_recovers(make_stack: MakeStack) -> None:
    stack = make_stack().serve()
    core = stack.roles()["core"]
    os.kill(core, signal.SIGSTOP)
    eventually(lambda: stack.run("healthcheck").returncode == 1, "not ready")
    assert "degraded" in stack.run("healthcheck").stdout
    assert "warmhold_engine_ready 0" in stack.run("metrics").stdout
    os.kill(core, signal.SIGCONT)
    eventually(lambda: stack.run("healthcheck").returncode == 0, "ready again")
    assert "engine recovered" in stack.text()
    assert stack.text().count("engine starting") == 1


def test_a_stopped_runner_is_unhealthy(make_stack: MakeStack) -> None:
    stack = make_stack().serve()
    runner = stack.runner
    os.kill(runner, signal.SIGSTOP)
    try:
        assert stack.run("healthcheck").returncode == 1
        assert "warmhold_up 0" in stack.run("metrics").stdout
    finally:
        os.kill(runner, signal.SIGCONT)
    eventually(lambda: stack.run("healthcheck").returncode == 0, "ready again")


def test_every_process_of_the_tree_is_without_rights(make_stack: MakeStack) -> None:
    stack = make_stack().serve()
    tree = stack.tree()
    assert len(tree) == 3
    for status in tree.values():
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert int(fields[name], 16) == 0, name
        assert fields["NoNewPrivs"] == "1"
        assert fields["Seccomp"] == "2"


def test_leftovers_of_an_earlier_engine_are_ended_first(
    make_stack: MakeStack, tmp_path: Path
) -> None:
    stack = make_stack()
    script = tmp_path / "pre.sh"
    launcher = ROOT / "entrypoint" / "warmhold_entrypoint" / "launcher.py"
    script.write_text(
        f"{sys.executable} -I -S {launcher} 0 30631 sleep 3600 &\n"
        f"sleep 0.3\nexec {sys.executable} -m warmhold_entrypoint --port {stack.port}\n"
    )
    with stack.log.open("ab") as log:
        stack._process = subprocess.Popen(
            ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "bash", str(script)],
            env=stack.environment,
            stdout=log,
            stderr=log,
        )
    stack.wait_ready()
    assert "ending the processes of an earlier engine" in stack.text()
    assert len(stack.tree()) == 3


def test_a_burst_of_60_mb_loses_no_line(make_stack: MakeStack) -> None:
    lines = 60_000
    stack = make_stack(FAKE_VLLM_BURST_LINES=str(lines)).serve()
    eventually(lambda: "burst done" in stack.text(), "the marker after the burst")
    numbers = re.findall(r"^burst (\d{7}) x{984}$", stack.text(), re.M)
    assert [int(number) for number in numbers] == list(range(lines))


def test_metrics_port_only_when_asked(make_stack: MakeStack) -> None:
    import urllib.request

    port = free_port()
    make_stack(WARMHOLD_METRICS_PORT=str(port)).serve()

    def scrape() -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    assert "warmhold_engine_ready 1" in eventually(scrape, "the metrics server")
    assert 'warmhold_mode_rejected{mode="snapshot",code="snapshot.absent"} 1' in scrape()


def test_the_api_key_is_used_and_never_shown(make_stack: MakeStack, tmp_path: Path) -> None:
    secret = tmp_path / "key"
    secret.write_text("sk-integration-42\n")
    stack = make_stack(WARMHOLD_API_KEY_FILE=str(secret)).serve()
    shown = stack.text() + json.dumps(stack.status()) + stack.run("plan", "--json").stdout
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            shown += (folder / "cmdline").read_text()
        except OSError:
            continue
    assert "key set" in stack.text()
    assert "sk-integration-42" not in shown


def test_a_model_is_downloaded_once_and_then_served(make_stack: MakeStack, tmp_path: Path) -> None:
    stack = make_stack(WARMHOLD_MODEL="owner/name", FAKE_HF_MODEL=str(write_model(tmp_path / "m")))
    stack.serve()
    assert "downloading owner/name" in stack.text()
    assert stack.supervisorctl("restart", "engine").returncode == 0
    assert stack.text().count("downloading owner/name") == 1


def test_a_download_that_fails_is_given_up(make_stack: MakeStack) -> None:
    stack = make_stack(WARMHOLD_MODEL="owner/name", WARMHOLD_MAX_FAILURES="2").boot()
    assert stack.wait() == 1
    assert "owner/name could not be downloaded" in stack.text()


def test_a_download_without_a_model_is_given_up(make_stack: MakeStack, tmp_path: Path) -> None:
    """As of a repository that has an adapter alone: hf ends with 0."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    values = {"WARMHOLD_MODEL": "owner/name", "FAKE_HF_MODEL": str(tmp_path / "m")}
    stack = make_stack(**values, WARMHOLD_MAX_FAILURES="2").boot()
    assert stack.wait() == 1
    assert "owner/name could not be downloaded" in stack.text()


def test_an_engine_that_is_late_is_ended_with_75(make_stack: MakeStack) -> None:
    stack = make_stack(
        WARMHOLD_READY_TIMEOUT_S="2", WARMHOLD_MAX_FAILURES="1", FAKE_VLLM_TOKEN_S="3600"
    ).boot()
    assert stack.wait() == 75
    assert "not ready within 2 s" in stack.text()
    assert stack.tree() == {}


def test_stop_while_starting(make_stack: MakeStack) -> None:
    stack = make_stack(FAKE_VLLM_TOKEN_S="3600").boot()
    eventually(lambda: len(stack.tree()) == 3, "the tree")
    assert stack.stop() == 0
    assert stack.tree() == {}


def test_a_killed_container_is_explained_at_the_next_start(make_stack: MakeStack) -> None:
    stack = make_stack().serve()
    stack.close()
    eventually(lambda: not stack.tree(), "the end of the namespace")
    status = stack.boot().wait_ready(starts=2)
    assert status["last_exit"]["code"] == 137
    assert "out of memory" in status["last_exit"]["reason"]
    assert len(stack.shm_files()) == 1
