# SPDX-License-Identifier: Apache-2.0
"""Snapshots as the runner makes and restores them: criu is a fake that starts the engine anew."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stack import Stack, eventually

MakeStack = Callable[..., Stack]


@pytest.fixture
def stack_with(make_stack: MakeStack, tmp_path: Path) -> Callable[..., Stack]:
    """Serve with what the fake criu is told to do wrong."""
    orders = {"FAKE_CRIU_FILE": tmp_path / "criu", "FAKE_VLLM_CONTROL_FILE": tmp_path / "control"}

    def serve(criu: str, **environment: str) -> Stack:
        (tmp_path / "criu").write_text(criu)
        return make_stack(
            **{name: str(path) for name, path in orders.items()}, **environment
        ).serve()

    return serve


@pytest.fixture
def stack(stack_with: Callable[..., Stack]) -> Stack:
    return stack_with("")


def tell(stack: Stack, what: str, order: str) -> None:
    """Tell the fake criu (`criu`) or engine (`control`) what is to go wrong; "" for nothing."""
    stack.folder.with_name(what).write_text(order)


def create(stack: Stack, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return stack.run("snapshot-create", "--name", "one", *arguments)


def artifacts(stack: Stack) -> list[str]:
    folder = stack.folder / "state" / "snapshots"
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def flat_files(stack: Stack) -> list[Path]:
    return sorted((stack.folder / "state" / "snapshots" / ".weights").iterdir())


def new_container(stack: Stack, **environment: str) -> dict[str, Any]:
    """Stop, and serve again in another PID 1: its vault is empty. Return the status."""
    status = stack.status()
    assert stack.stop() == 0 and status
    stack.environment.update(environment)
    stack.boot()
    return stack.wait_ready(status["starts"] + 1)


def snapshot_reason(stack: Stack) -> str:
    status = stack.status()
    assert status
    return next((r["code"] for r in status["rejections"] if r["mode"] == "snapshot"), "")


def kill_front(stack: Stack) -> None:
    os.kill(stack.roles()["front"], signal.SIGKILL)


def maker_of(stack: Stack) -> int:
    return process_of(stack, b"warmhold_entrypoint.snapshot_mode.maker")


def criu_of(stack: Stack) -> int:
    return process_of(stack, b"criu\0restore")


def process_of(stack: Stack, words: bytes) -> int:
    """PID of a process of this stack from outside, or 0."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            environ = (folder / "environ").read_bytes()
        except OSError:
            continue
        if words in command and str(stack.folder).encode() in environ:
            return int(folder.name)
    return 0


def begin_and_wait(stack: Stack) -> "subprocess.Popen[str]":
    """Begin a snapshot whose dump does not end; return who asked for it."""
    tell(stack, "criu", "wait")
    asking = subprocess.Popen(
        [sys.executable, "-m", "warmhold_entrypoint", "snapshot-create", "--name", "one"],
        env=stack.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    folder = stack.folder / "state" / "snapshots"
    eventually(lambda: list(folder.glob(".tmp-*/dump.log")), "the dump")
    return asking


def test_an_engine_is_snapshotted_and_comes_back(stack: Stack) -> None:
    before = stack.roles()
    made = create(stack, "--json")
    assert made.returncode == 0, made.stderr
    report = json.loads(made.stdout)
    assert (report["name"], artifacts(stack)) == ("one", ["one"])
    status = stack.wait_ready()
    assert stack.roles() == before
    assert (status["mode"], status["starts"]) == ("disk", 1)
    eventually(lambda: (stack.status() or {}).get("saved_as") == "one", "that it is told")
    assert stack.text().count("argv [") == 1
    for starts in (2, 3):
        kill_front(stack)
        status = stack.wait_ready(starts)
        assert (status["mode"], status["snapshot"]) == ("snapshot", "one")
        assert status["saved_as"] == ""
        assert {"verify", "image", "weights", "canary", "first_token"} <= set(status["phases"])
        assert abs(sum(status["phases"].values()) - status["total_s"]) < 1e-6
        assert status["phases"]["unaccounted"] < 0.05 * status["total_s"]
        assert status["crashes"] == starts - 1
        assert len(stack.tree()) == 3 and len(stack.shm_files()) == 1
        assert stack.text().count("argv [") == starts, "the log goes on"
    assert stack.complete()["choices"]
    result = stack.supervisorctl("restart", "engine")
    assert "ready in mode snapshot" in result.stdout, result.stdout
    assert stack.stop() == 0
    assert stack.tree() == {} and stack.shm_files() == set()


def test_clients_are_refused_while_it_is_made_and_served_again(stack: Stack) -> None:
    asking = begin_and_wait(stack)
    status = stack.status()
    assert status and (status["state"], status["ready"]) == ("SNAPSHOTTING", False)
    assert stack.run("healthcheck").returncode == 1
    again = create(stack)
    assert again.returncode == 73 and "snapshot.not-serving" in again.stderr
    tell(stack, "criu", "")
    assert asking.wait(60) == 0
    stack.wait_ready()
    assert stack.complete()["choices"] and artifacts(stack) == ["one"]


def test_whoever_asked_for_it_may_be_killed(stack: Stack) -> None:
    asking = begin_and_wait(stack)
    asking.kill()
    asking.wait(60)
    tell(stack, "criu", "")
    eventually(lambda: artifacts(stack) == ["one"], "the snapshot")
    stack.wait_ready()


def test_a_dump_that_fails_costs_nothing(stack: Stack) -> None:
    before = stack.roles()
    tell(stack, "criu", "dump")
    made = create(stack)
    assert made.returncode == 73
    assert "error: snapshot.dump: " in made.stderr and "told to fail" in made.stderr
    status = stack.wait_ready()
    assert (stack.roles(), status["starts"], artifacts(stack)) == (before, 1, [])
    assert status["saved_as"] == ""


def test_an_engine_that_cannot_be_quiesced_goes_on(stack: Stack) -> None:
    before = stack.roles()
    tell(stack, "control", "warmhold_quiesce")
    made = create(stack)
    assert made.returncode == 73 and "snapshot.engine" in made.stderr
    stack.wait_ready()
    assert (stack.roles(), artifacts(stack)) == (before, [])


def test_a_killed_maker_leaves_a_serving_engine(stack: Stack) -> None:
    before = stack.roles()
    asking = begin_and_wait(stack)
    os.kill(maker_of(stack), signal.SIGKILL)
    output, _ = asking.communicate(timeout=60)
    assert asking.returncode == 73 and "snapshot.killed" in output
    stack.wait_ready()
    assert stack.roles() == before and stack.complete()["choices"]
    tell(stack, "criu", "")
    eventually(lambda: create(stack).returncode == 0, "a snapshot once criu has ended")
    assert artifacts(stack) == ["one"]


def test_an_engine_that_cannot_be_resumed_is_started_anew(stack: Stack) -> None:
    asking = begin_and_wait(stack)
    tell(stack, "control", "warmhold_resume")
    tell(stack, "criu", "")
    output, _ = asking.communicate(timeout=60)
    assert asking.returncode == 73 and "snapshot.resume" in output
    tell(stack, "control", "")
    status = stack.wait_ready(2)
    assert (status["crashes"], artifacts(stack)) == (1, [])
    assert "does not serve again" in status["last_exit"]["reason"]


def test_a_stop_meanwhile_ends_with_0(stack: Stack) -> None:
    asking = begin_and_wait(stack)
    os.kill(stack.pid, signal.SIGTERM)
    eventually(lambda: "stop" in stack.text().lower(), "the stop")
    tell(stack, "criu", "")
    assert stack.wait() == 0
    asking.wait(60)
    assert stack.tree() == {}


@pytest.mark.parametrize(
    ("order", "code"), [("restore", "snapshot.restore"), ("nonce", "snapshot.canary")]
)
def test_a_restore_that_fails_is_followed_by_the_next_mode(
    stack: Stack, order: str, code: str
) -> None:
    assert create(stack).returncode == 0
    tell(stack, "criu", order)
    kill_front(stack)
    status = stack.wait_ready(2)
    assert (status["mode"], status["crashes"], snapshot_reason(stack)) == ("ipc_cache", 1, code)
    assert len(stack.tree()) == 3 and len(stack.shm_files()) == 1
    tell(stack, "criu", "")
    kill_front(stack)
    assert stack.wait_ready(3)["mode"] == "ipc_cache"
    assert snapshot_reason(stack) == "snapshot.marked-failed"
    restored = stack.run("snapshot-restore", "one")
    assert restored.returncode == 0, restored.stderr
    status = stack.wait_ready(4)
    assert (status["mode"], status["crashes"]) == ("snapshot", 2)
    kill_front(stack)
    assert stack.wait_ready(5)["mode"] == "snapshot", "the mark is gone"


def kill_while_it_restores(stack: Stack) -> None:
    """Kill the engine; return when its restore waits."""
    assert create(stack).returncode == 0
    tell(stack, "criu", "wait")
    kill_front(stack)
    eventually(lambda: stack.text().count("engine restoring") == 1, "the restore")
    eventually(lambda: criu_of(stack), "criu")


def test_a_stop_while_it_restores_ends_with_0(stack: Stack) -> None:
    kill_while_it_restores(stack)
    os.kill(stack.pid, signal.SIGTERM)
    assert stack.wait() == 0
    assert criu_of(stack) == 0 and stack.tree() == {} and stack.shm_files() == set()


def test_a_runner_that_is_killed_while_it_restores(stack: Stack) -> None:
    runner = stack.runner
    kill_while_it_restores(stack)
    os.kill(runner, signal.SIGKILL)
    tell(stack, "criu", "")  # and it brings back a whole tree that is nobody's
    status = stack.wait_ready(2)
    assert stack.runner != runner
    assert (status["mode"], len(stack.tree())) == ("snapshot", 3)
    assert stack.complete()["choices"]


def test_one_whose_engines_end_by_themselves_is_left_alone(stack: Stack) -> None:
    assert create(stack).returncode == 0
    for starts in (2, 3, 4):
        os.kill(stack.roles()["core"], signal.SIGKILL)
        status = stack.wait_ready(starts)
    assert (status["mode"], snapshot_reason(stack)) == ("ipc_cache", "snapshot.marked-failed")
    assert "snapshot.unstable" in stack.text()


def test_a_new_container_gets_the_weights_out_of_the_flat_file(stack: Stack) -> None:
    report = json.loads(create(stack, "--json").stdout)
    (flat,) = flat_files(stack)
    assert report["weights_bytes"] == 300 << 14 and "weights" in report["seconds"]
    status = new_container(stack)
    assert (status["mode"], status["snapshot"], status["crashes"]) == ("snapshot", "one", 0)
    assert status["weights"]["mode"] == "flat"
    assert status["weights"]["published"] == [flat.name]
    assert {"vault", "flat", "verify", "image", "weights"} <= set(status["phases"])
    assert abs(sum(status["phases"].values()) - status["total_s"]) < 1e-6
    assert "read from a flat file" in stack.run("status").stdout
    assert f"weights mapped {flat.name}" in stack.text()
    kill_front(stack)
    status = stack.wait_ready(status["starts"] + 1)
    assert (status["mode"], status["weights"]["mode"]) == ("snapshot", "ipc_cache")
    assert "flat" not in status["phases"]


def test_none_writes_no_flat_file_and_reads_none(make_stack: MakeStack) -> None:
    stack = make_stack(WARMHOLD_SNAPSHOT_WEIGHTS="none").serve()
    assert create(stack).returncode == 0
    assert not (stack.folder / "state" / "snapshots" / ".weights").exists()
    status = new_container(stack)
    assert (status["mode"], snapshot_reason(stack)) == ("disk", "snapshot.weights-absent")
    kill_front(stack)
    assert stack.wait_ready(3)["mode"] == "snapshot", "they are resident now"
    new_container(stack, WARMHOLD_SNAPSHOT_WEIGHTS="flat")
    assert snapshot_reason(stack) == "snapshot.weights-absent", "there is no file"
    assert create(stack).returncode == 0 and len(flat_files(stack)) == 1
    new_container(stack, WARMHOLD_SNAPSHOT_WEIGHTS="none")
    assert snapshot_reason(stack) == "snapshot.weights-absent", "it is not read"


def test_a_damaged_flat_file_goes_and_the_next_mode_follows(stack: Stack) -> None:
    assert create(stack).returncode == 0
    (flat,) = flat_files(stack)
    with flat.open("r+b") as file:
        file.write(b"X" * 100)
    status = new_container(stack)
    assert (status["mode"], status["crashes"]) == ("disk", 0)
    assert snapshot_reason(stack) == "snapshot.weights-damaged"
    assert flat_files(stack) == [] and stack.text().count("engine restoring") == 1
    kill_front(stack)
    assert stack.wait_ready(3)["mode"] == "snapshot", "the artifact itself is sound"
    status = new_container(stack)
    assert (status["mode"], snapshot_reason(stack)) == ("disk", "snapshot.weights-absent")


def test_a_flat_file_that_cannot_be_written_is_left_out(stack: Stack) -> None:
    (stack.folder / "state" / "snapshots" / ".weights").write_text("in the way")
    made = create(stack)
    assert made.returncode == 0 and "no flat weights: " in made.stdout
    stack.wait_ready()
    kill_front(stack)
    assert stack.wait_ready(2)["mode"] == "snapshot", "the vault has them"


def test_a_restart_in_the_mode_that_is_asked_for(stack: Stack) -> None:
    assert create(stack).returncode == 0
    for starts, mode in enumerate(("disk", "ipc_cache", "snapshot", "ipc_cache"), 2):
        done = stack.run("restart", "--mode", mode, "--json")
        assert done.returncode == 0, done.stderr
        told, status = json.loads(done.stdout), stack.status()
        assert status and (told["mode"], status["mode"], status["starts"]) == (mode, mode, starts)
        assert {"plan", "stop"} <= set(told["seconds"])
        assert abs(sum(status["phases"].values()) - status["total_s"]) < 1e-6
        assert told["name"] == ("one" if mode == "snapshot" else "")
        assert status["crashes"] == 0
    done = stack.run("restart")
    assert done.stdout.startswith("restarted  in mode snapshot in "), done.stdout + done.stderr
    assert stack.status()["mode"] == "snapshot", "by default the fastest"  # type: ignore[index]


def test_a_restart_that_cannot_be_is_refused_and_costs_nothing(stack: Stack) -> None:
    before = stack.roles()
    done = stack.run("restart", "--mode", "snapshot")
    assert done.returncode == 74 and "snapshot.absent" in done.stderr
    (stack.folder / "model" / "config.json").unlink()
    done = stack.run("restart", "--mode", "disk")
    assert done.returncode == 78 and "model.missing" in done.stderr
    assert stack.roles() == before and stack.wait_ready()["starts"] == 1


def test_a_restart_that_fails_is_followed_by_the_usual_start(stack: Stack) -> None:
    stack.engine_exit.write_text("1")
    done = stack.run("restart", "--mode", "disk")
    stack.engine_exit.unlink(missing_ok=True)
    assert done.returncode == 1 and "engine.failed" in done.stderr
    assert stack.wait_ready()["mode"] == "ipc_cache"
    assert "failed_attempt" in stack.status()["phases"]  # type: ignore[index]


def test_snapshot_restore_says_why_it_cannot(stack: Stack) -> None:
    before = stack.roles()
    result = stack.run("snapshot-restore")
    assert result.returncode == 74 and "error: snapshot.absent" in result.stderr
    assert stack.run("snapshot-restore", "other").returncode == 74
    assert stack.roles() == before
    assert create(stack).returncode == 0
    tell(stack, "criu", "restore")
    result = stack.run("snapshot-restore")
    assert result.returncode == 74 and "told to fail" in result.stderr
    status = stack.wait_ready(2)
    assert (status["mode"], status["crashes"]) == ("ipc_cache", 0)


def test_a_changed_key_ends_the_snapshot(make_stack: MakeStack) -> None:
    stack = make_stack(WARMHOLD_API_KEY="sk-old").serve()
    assert create(stack).returncode == 0
    for path in (stack.folder / "state" / "snapshots" / "one").rglob("manifest.json"):
        assert "sk-old" not in path.read_text()
    assert stack.stop() == 0
    stack.environment["WARMHOLD_API_KEY"] = "sk-new"
    stack.boot()
    stack.wait_ready(2)
    assert snapshot_reason(stack) == "snapshot.identity-mismatch"
    eventually(lambda: artifacts(stack) == [], "the artifact's end")


@pytest.mark.parametrize("mode", ["manual", "off"])
@pytest.mark.parametrize("damage", ["manifest", "key"])
def test_a_changed_key_ends_what_cannot_be_read_too(
    make_stack: MakeStack, mode: str, damage: str
) -> None:
    stack = make_stack(WARMHOLD_API_KEY="sk-old").serve()
    assert create(stack).returncode == 0
    assert stack.stop() == 0
    folder = stack.folder / "state" / "snapshots"
    if damage == "manifest":
        (folder / "one" / "manifest.json").write_text("{")
    else:
        (folder / ".key").unlink()
    (folder / ".tmp-two-0123" / "images").mkdir(parents=True)
    (folder / ".tmp-two-0123" / "images" / "pages-1.img").write_text("sk-old")
    stack.environment |= {"WARMHOLD_API_KEY": "sk-new", "WARMHOLD_SNAPSHOT": mode}
    stack.boot()
    stack.wait_ready(2)
    assert snapshot_reason(stack) == ("snapshot.off" if mode == "off" else "snapshot.damaged")
    eventually(lambda: artifacts(stack) == [], "the artifacts' end")
    assert "removed what a killed maker left" in stack.text()


def test_a_snapshot_that_nobody_can_read_and_that_holds_no_secret_stays(stack: Stack) -> None:
    assert create(stack).returncode == 0
    manifest = stack.folder / "state" / "snapshots" / "one" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-5])
    kill_front(stack)
    stack.wait_ready(2)
    assert (snapshot_reason(stack), artifacts(stack)) == ("snapshot.damaged", ["one"])


def test_a_changed_name_ends_the_snapshot(stack: Stack) -> None:
    assert create(stack).returncode == 0
    assert stack.stop() == 0
    model = stack.folder / "model"
    (model.with_name("other")).symlink_to(model)
    stack.environment["WARMHOLD_MODEL"] = str(model.with_name("other"))
    stack.boot()
    stack.wait_ready(2)
    assert snapshot_reason(stack) == "snapshot.identity-mismatch"
    eventually(lambda: artifacts(stack) == [], "the artifact's end")


def test_a_changed_file_of_the_model_rejects_the_snapshot(stack: Stack) -> None:
    (stack.folder / "model" / "tokenizer_config.json").write_text('{"chat_template": "a"}')
    kill_front(stack)
    stack.wait_ready(2)
    assert create(stack).returncode == 0
    (stack.folder / "model" / "tokenizer_config.json").write_text('{"chat_template": "b"}')
    kill_front(stack)
    status = stack.wait_ready(3)
    (reason,) = [item for item in status["rejections"] if item["mode"] == "snapshot"]
    assert reason["code"] == "snapshot.identity-mismatch"
    assert "files.model: -tokenizer_config.json:" in reason["detail"]
    assert artifacts(stack) == ["one"], "it holds nothing that was revoked"
    (stack.folder / "model" / "tokenizer_config.json").write_text('{"chat_template": "a"}')
    kill_front(stack)
    assert stack.wait_ready(4)["mode"] == "snapshot", "and it fits again"


def test_an_engine_that_can_never_be_snapshotted(make_stack: MakeStack) -> None:
    stack = make_stack().serve("--api-server-count", "2")
    assert snapshot_reason(stack) == "snapshot.unsupported"
    made = create(stack)
    assert made.returncode == 73 and "error: snapshot.unsupported: 2 API servers" in made.stderr
    assert stack.run("snapshot-restore").returncode == 74


def test_a_missing_right_ends_with_77(make_stack: MakeStack) -> None:
    stack = make_stack()
    stack.wrapper = ("setpriv", "--bounding-set=-sys_time")
    stack.serve()
    assert snapshot_reason(stack) == "snapshot.rights"
    for made in (create(stack), stack.run("snapshot-restore")):
        assert made.returncode == 77
        assert "error: snapshot.rights: CAP_SYS_TIME" in made.stderr


def test_the_hubs_token_is_in_no_snapshot(make_stack: MakeStack) -> None:
    stack = make_stack(HF_TOKEN="hf_secret1", HF_HUB_OFFLINE="true")
    stack.serve("--hf-token", "hf_secret2")
    assert create(stack).returncode == 0
    assert "hf_secret" not in stack.text()
    for path in (stack.folder / "state").rglob("*"):
        if path.is_file():
            assert b"hf_secret" not in path.read_bytes(), path
    for pid in stack.tree():
        assert b"hf_secret" not in Path(f"/proc/{pid}/environ").read_bytes()
        assert b"hf_secret" not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_off_means_neither(make_stack: MakeStack) -> None:
    stack = make_stack(WARMHOLD_SNAPSHOT="off").serve()
    made = create(stack)
    assert made.returncode == 73 and "snapshot.off" in made.stderr
    assert snapshot_reason(stack) == "snapshot.off"


def test_a_named_mode_that_fails_ends_with_74(stack: Stack) -> None:
    assert create(stack).returncode == 0
    assert stack.stop() == 0
    stack.environment["WARMHOLD_MODE"] = "snapshot"
    tell(stack, "criu", "restore")
    stack.boot()
    assert stack.wait() == 74
    assert "told to fail" in stack.text()


def test_one_is_made_by_itself_when_nobody_asks(make_stack: MakeStack) -> None:
    stack = make_stack(WARMHOLD_SNAPSHOT="auto", WARMHOLD_SNAPSHOT_IDLE_S="1").serve()
    eventually(lambda: "snapshot made" in stack.text(), "the snapshot")
    (name,) = artifacts(stack)
    stack.wait_ready()
    assert stack.stop() == 0
    stack.environment["FAKE_VLLM_OTHER"] = "makes another identity"
    stack.boot()
    stack.wait_ready(2)
    assert snapshot_reason(stack) == "snapshot.identity-mismatch"
    eventually(lambda: stack.text().count("snapshot made") == 2, "a new one")
    assert len(artifacts(stack)) == 1 and artifacts(stack) != [name]
    stack.wait_ready()
    kill_front(stack)
    assert stack.wait_ready(3)["mode"] == "snapshot"


def test_one_that_fails_by_itself_costs_nothing(stack_with: Callable[..., Stack]) -> None:
    stack = stack_with("dump", WARMHOLD_SNAPSHOT="auto", WARMHOLD_SNAPSHOT_IDLE_S="1")
    eventually(lambda: "no snapshot code=snapshot.dump" in stack.text(), "the failure")
    assert stack.wait_ready()["starts"] == 1
    assert (stack.folder / "run" / "auto-snapshot.json").exists()
