# SPDX-License-Identifier: Apache-2.0
"""The image's own behaviour, with the small engine in vLLM's place: cheap, so in depth."""

import re
from collections.abc import Callable

import pytest
from box import Box
from stack import eventually

from docker import DockerClient

pytestmark = pytest.mark.container
RunFake = Callable[..., Box]
ON_FAILURE = {"Name": "on-failure", "MaximumRetryCount": 2}


def test_restart_by_exec_with_an_empty_environment(run_fake: RunFake) -> None:
    box = run_fake()
    box.wait_ready()
    code, text = box.run("env", "-i", "supervisorctl", "restart", "engine")
    assert code == 0, text
    assert box.wait_ready(starts=2)["crashes"] == 0
    assert box.bad_lines() == []


def test_restart_that_does_not_serve_is_an_error(run_fake: RunFake) -> None:
    environment = {"FAKE_VLLM_EXIT_FILE": "/tmp/exit", "WARMHOLD_MAX_FAILURES": "5"}
    box = run_fake(environment={**environment, "WARMHOLD_READY_TIMEOUT_S": "5"})
    box.wait_ready()
    assert box.run("sh", "-c", "echo 2 > /tmp/exit")[0] == 0
    code, _ = box.run("supervisorctl", "restart", "engine")
    assert code != 0
    assert box.wait_end() == 2


def test_fatal_ends_the_container_and_is_never_healthy(run_fake: RunFake) -> None:
    box = run_fake("--no-such-flag", restart_policy=ON_FAILURE)
    eventually(lambda: box.state()["Status"] == "exited", "the end", 120)
    state = box.state()
    assert state["ExitCode"] == 2
    assert state["Health"]["Status"] != "healthy"
    assert box.container.attrs["RestartCount"] == 2


def test_a_configuration_error_starts_no_engine_at_all(run_fake: RunFake) -> None:
    box = run_fake(environment={"WARMHOLD_MODE": "fast"}, restart_policy=ON_FAILURE)
    eventually(lambda: box.state()["Status"] == "exited", "the end", 120)
    assert box.state()["ExitCode"] == 78
    log = box.log()
    assert "engine starting" not in log
    assert "Traceback" not in log
    # Docker's own policy is bounded; ours does not try again.
    assert log.count("error: settings.mode") == 1 + box.container.attrs["RestartCount"] <= 3


def test_stop_is_0_and_within_the_grace(run_fake: RunFake) -> None:
    box = run_fake()
    box.wait_ready()
    box.container.stop(timeout=60)
    assert box.state()["ExitCode"] == 0


def test_a_burst_of_60_mb_reaches_docker_logs_whole(run_fake: RunFake) -> None:
    box = run_fake(environment={"FAKE_VLLM_BURST_LINES": "60000"})
    box.wait_ready()
    eventually(lambda: "burst done" in box.log(), "the marker after the burst", 120)
    numbers = re.findall(r"^burst (\d{7}) x{984}$", box.log(), re.MULTILINE)
    assert [int(number) for number in numbers] == list(range(60000))


def test_any_user(run_fake: RunFake) -> None:
    """A uid without a passwd entry and without capabilities serves all the same."""
    box = run_fake(
        user="12345:12345",
        cap_drop=["ALL"],
        tmpfs={"/var/lib/warmhold": "uid=12345", "/run/warmhold": "uid=12345"},
    )
    box.wait_ready()
    assert box.run("supervisorctl", "restart", "engine")[0] == 0
    box.container.stop(timeout=60)
    assert box.state()["ExitCode"] == 0


def test_an_unwritable_volume(run_fake: RunFake) -> None:
    box = run_fake(user="12345:12345", tmpfs={"/run/warmhold": "uid=12345"})
    assert box.wait_end() == 77
    assert (
        "error: rights.not-writable: /var/lib/warmhold is not writable for uid 12345" in box.log()
    )


def test_a_memory_limit_below_the_need(run_fake: RunFake) -> None:
    box = run_fake(mem_limit="1g")
    assert box.wait_end() == 78
    assert "error: memory.too-small: the model needs" in box.log()
    assert "the cgroup limit is 1.00 GiB" in box.log()


def test_a_worker_killed_for_memory_is_explained(run_fake: RunFake) -> None:
    environment = {"FAKE_VLLM_EAT_FILE": "/tmp/eat", "WARMHOLD_KV_CACHE_GIB": "0.1"}
    box = run_fake(environment=environment, mem_limit="2500m", memswap_limit="2500m")
    box.wait_ready()
    assert box.run("touch", "/tmp/eat")[0] == 0
    status = box.wait_ready(starts=2)
    assert "killed for memory" in status["last_exit"]["reason"]
    assert len(box.tree()) == 3
    assert box.state()["Running"] is True


def test_a_small_shm(run_fake: RunFake) -> None:
    box = run_fake(shm_size="64m")
    assert box.wait_end() == 78
    assert "error: shm.too-small" in box.log()


def test_a_cpu_quota_becomes_the_threads(run_fake: RunFake) -> None:
    box = run_fake(nano_cpus=1_000_000_000)
    box.wait_ready()
    code, text = box.run("warmhold", "plan", "--json")
    assert code == 0, text
    assert '"OMP_NUM_THREADS": "1"' in text
    assert '"VLLM_CPU_OMP_THREADS_BIND": "nobind"' in text


def test_a_killed_runner_is_replaced(run_fake: RunFake) -> None:
    box = run_fake()
    status = box.wait_ready()
    assert box.run("kill", "-9", str(status["runner_pid"]))[0] == 0
    box.wait_ready(starts=2)
    assert len(box.tree()) == 3


def test_another_command_is_executed_as_given(engine: DockerClient) -> None:
    output = engine.containers.run("warmhold:cpu", ["python3", "-c", "print('a  b')"], remove=True)
    assert output == b"a  b\n"


def test_what_the_image_has_and_has_not(engine: DockerClient) -> None:
    script = (
        "criu --version; supervisord --version; ! test -s /etc/machine-id && echo no-machine-id;"
        "cat /opt/warmhold/build-id; for t in ip iptables g++ openssl; do command -v $t; done; "
        "! ls /run/secrets/* 2>/dev/null && echo no-secrets"
    )
    text = engine.containers.run("warmhold:cpu", ["sh", "-c", script], remove=True).decode()
    assert "Version: 4.2.1" in text
    assert "4.3.0" in text
    assert "no-machine-id" in text
    assert "no-secrets" in text
    assert re.search(r"^[0-9a-f]{16}$", text, re.MULTILINE)
    for tool in ("/ip", "/iptables", "/g++", "/openssl"):
        assert tool in text
