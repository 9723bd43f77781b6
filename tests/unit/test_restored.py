# SPDX-License-Identifier: Apache-2.0
"""A child that was not started here, and restores that fail before there is one."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vault_process import SIZE, close_all, make_generation, running_vault
from warmhold_entrypoint.gpus.gpu_memory import Need
from warmhold_entrypoint.running.adopted import AdoptedChild
from warmhold_entrypoint.running.loop import Loop
from warmhold_entrypoint.snapshot_mode import restored
from warmhold_entrypoint.snapshot_mode.restored import CIRCUMSTANTIAL, Restoration, Wish, reject
from warmhold_entrypoint.snapshot_mode.snapshots import GENERATIONS, read_circumstances
from warmhold_entrypoint.weight_cache.resident import Vault
from warmhold_snapshot.artifact import Store
from warmhold_snapshot.errors import SnapshotError
from warmhold_snapshot.flat import Weights
from warmhold_snapshot.manifest import FORMAT, Manifest
from warmhold_snapshot.mark import read_mark
from warmhold_snapshot.pids import Process
from warmhold_snapshot.restore import Restored
from warmhold_wcache.control_client import ControlError
from warmhold_wcache.generation import encode_description

PATIENCE_S = 60


def adopt(code: str) -> AdoptedChild:
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ)
    return AdoptedChild(pid, os.pidfd_open(pid))


def test_a_status_of_its_own() -> None:
    child = adopt("raise SystemExit(7)")
    assert child.wait(PATIENCE_S) == child.poll() == 7
    child.send_signal(signal.SIGKILL)  # it has ended: nobody is hit


def test_a_signal_is_told_as_subprocess_does() -> None:
    child = adopt("import signal; signal.pause()")
    assert child.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0)
    child.send_signal(signal.SIGKILL)
    assert child.wait(PATIENCE_S) == -signal.SIGKILL


def test_one_that_somebody_else_has_reaped() -> None:
    child = adopt("pass")
    os.waitpid(child.pid, 0)
    assert child.wait(PATIENCE_S) == -signal.SIGKILL


def test_no_descriptor_is_left() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    adopt("pass").wait(PATIENCE_S)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_an_artifact_that_is_gone(tmp_path: Path) -> None:
    ended = threading.Event()
    wish = Wish(tmp_path / "snapshots", "one", tmp_path / "c.sock", tmp_path / "v.sock", True, True)
    restoration = Restoration(wish, ended.set)
    assert ended.wait(PATIENCE_S) and restoration.done
    assert restoration.process is None
    assert restoration.error and restoration.error.code == "snapshot.absent"
    os.close(restoration.reader)


@pytest.mark.parametrize(
    ("flat", "code"), [(True, "snapshot.stopped"), (False, "snapshot.weights-absent")]
)
def test_a_stop_ends_the_reading_of_a_flat_file(tmp_path: Path, flat: bool, code: str) -> None:
    store, (generation, fds) = Store(tmp_path / "snapshots"), make_generation()
    description, sizes = encode_description(generation), [SIZE] * len(fds)
    store.flat.write(Weights(generation.id, description, tuple(zip(fds, sizes, strict=True))))
    close_all(fds)
    with store.draft("one") as draft:
        store.publish(draft, make_manifest(generation.id))
    ended = threading.Event()

    class StoppedLoop(Loop):
        """One whose first wait lets a vault come, when the stop is known already."""

        def __init__(self) -> None:
            self.stop_asked = True

        def wait(self, deadline: float | None) -> None:
            vaults.enter_context(running_vault(tmp_path))
            assert ended.wait(PATIENCE_S)

    wish = Wish(store.folder, "one", tmp_path / "c.sock", tmp_path / "vault.sock", True, flat)
    with ExitStack() as vaults:
        restoration = Restoration(wish, ended.set)
        restoration.wait(StoppedLoop())
    assert restoration.error and restoration.error.code == code
    assert restoration.process is None
    store.flat.verify(generation.id, checksums=True)


@pytest.mark.parametrize(
    ("on_gpu", "cut_off"), [(False, False), (True, False), (True, True)], ids=str
)
def test_criu_gets_its_plugins_for_an_engine_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_gpu: bool, cut_off: bool
) -> None:
    """A wait for memory that criu's own end cut off tells nothing of why that was."""
    given: dict[str, Any] = {}

    def refuse(*_: object, **named: object) -> None:
        given.update(named)
        if on_gpu:
            over = threading.Event()
            if cut_off:
                over.set()
            given["ready"](over)
        raise SnapshotError("snapshot.restore", "no", "")

    def lack(need: Need, limit_s: float, stop: threading.Event) -> str:
        assert (dict(need.by_uuid), limit_s, stop.is_set()) == ({"u1": 7}, 9.0, cut_off)
        return "GPU u1 lacks 3 MiB"

    monkeypatch.setattr(restored, "restore", refuse)
    monkeypatch.setattr(restored, "wait_for_memory", lack)
    monkeypatch.setattr(restored.pids, "raise_cursor", lambda above: above)
    store = Store(tmp_path / "snapshots")
    manifest = make_manifest("")
    identity = {"gpu.uuid": "u1"} if on_gpu else {"kernel": "k"}
    with store.draft("one") as draft:
        store.publish(draft, msgspec.structs.replace(manifest, identity=identity, weights={}))
    ended = threading.Event()
    plugins = Path("/plug")
    sockets = (tmp_path / "c", tmp_path / "v")
    wish = Wish(store.folder, "one", *sockets, True, True, plugins, Need({"u1": 7}), 9.0)
    restoration = Restoration(wish, ended.set)
    assert ended.wait(PATIENCE_S)
    lacks = on_gpu and not cut_off
    assert restoration.error
    assert restoration.error.code == ("snapshot.gpu-memory" if lacks else "snapshot.restore")
    assert given["plugins"] == (plugins if on_gpu else None)
    assert given["limits"].criu_s == (129.0 if on_gpu else 60.0)
    assert (given["ready"] is None) != on_gpu
    told = "no (gpu.memory: GPU u1 lacks 3 MiB)" if lacks else "no"
    assert restoration.error.detail == told
    os.close(restoration.reader)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("snapshot.restore", "snapshot.gpu-memory"),
        ("snapshot.resume", "snapshot.gpu-memory"),
        ("snapshot.damaged", "snapshot.damaged"),
    ],
)
def test_an_artifact_is_not_blamed_for_a_gpu_without_memory(code: str, told: str) -> None:
    found = restored._explain(SnapshotError(code, "no", "fix", ["a line"]), "GPU u1 lacks 3 MiB")
    assert (found.code, found.lines) == (told, ("a line",))
    assert found.detail == "no (gpu.memory: GPU u1 lacks 3 MiB)"
    assert (found.code in restored.CIRCUMSTANTIAL) == (found.remedy != "fix") == (told != code)


def test_nothing_is_asked_of_an_engine_that_serves_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that have waited keep it busy: an answer may take longer than its limit."""
    asked: list[str] = []

    class Engine:
        def __init__(self, socket: Path) -> None:
            self._act("connect")

        def _act(self, name: str) -> None:
            if "resume" in asked:
                raise ControlError("control.timeout", f"no {name} within 5 s", "")
            asked.append(name)

        def map_weights(self) -> None:
            self._act("map")

        def require_canary(self, wanted: object) -> None:
            self._act("canary")

        def resume(self) -> None:
            self._act("resume")

        def generations(self) -> dict[str, int]:
            self._act("generations")
            return {"g": 7}

    store = Store(tmp_path / "snapshots")
    manifest = msgspec.structs.replace(make_manifest(""), weights={}, notes={})
    with store.draft("one") as draft:
        store.publish(draft, manifest)
    child = subprocess.Popen(["sleep", "60"])
    found = Restored(child.pid, os.pidfd_open(child.pid), manifest, {"verify": 0.0})
    monkeypatch.setattr(restored, "restore", lambda *given, **named: found)
    monkeypatch.setattr(restored, "ControlledEngine", Engine)
    monkeypatch.setattr(restored.pids, "raise_cursor", lambda above: above)
    ended = threading.Event()
    wish = Wish(store.folder, "one", tmp_path / "c", tmp_path / "v", True, True)
    restoration = Restoration(wish, ended.set)
    assert ended.wait(PATIENCE_S)
    child.kill()
    child.wait()
    os.close(found.pidfd)
    os.close(restoration.reader)
    assert restoration.error is None and asked[-1] == "resume"
    assert restoration.weights and restoration.weights["bytes"] == 7


def make_manifest(generation_id: str) -> Manifest:
    return Manifest(
        **dict.fromkeys(("stdio", "listeners", "open_files", "shm", "files"), ()),
        **{name: {} for name in ("counts", "bytes_by_kind", "bytes_by_process", "timings")},
        format=FORMAT,
        name="one",
        created="1",
        identity={},
        processes=(Process(3001, 1, 3001, 3001, "vllm", 5, (3001,)),),
        notes={GENERATIONS: generation_id},
        weights={generation_id: 3 * SIZE},
    )


def test_why_it_failed_stays_beside_the_artifact(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path / "snapshots")
    wish = Wish(store.folder, "one", tmp_path, tmp_path, True, True)
    error = SnapshotError("snapshot.restore", "why", "do", ["Error (a.c:1): no"])
    assert reject(wish, error).code == "snapshot.restore", "there is no such artifact"
    store.path("one").mkdir()
    rejection = reject(wish, error)
    assert (rejection.mode, rejection.detail, rejection.remedy) == ("snapshot", "why", "do")
    mark = read_mark(store.path("one"))
    assert mark and mark.code == "snapshot.restore"
    assert mark.circumstances == read_circumstances(Vault())


def test_what_is_no_fault_of_an_artifact_leaves_no_mark(tmp_path: Path) -> None:
    store = Store(tmp_path / "snapshots")
    store.path("one").mkdir()
    wish = Wish(store.folder, "one", tmp_path, tmp_path, True, True)
    for code in (*CIRCUMSTANTIAL, "snapshot.weights-damaged"):
        assert reject(wish, SnapshotError(code, "why", "do")).code == code
    assert read_mark(store.path("one")) is None
