# SPDX-License-Identifier: Apache-2.0
"""The holder's program and its order, and the ground laid for an engine."""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from warmhold_entrypoint.container import supervision
from warmhold_entrypoint.container.supervision import Program, SupervisionError
from warmhold_entrypoint.errors import Exit
from warmhold_entrypoint.gpus.gpu_memory import Need
from warmhold_entrypoint.plan import Attempt, Plan
from warmhold_entrypoint.running import groundwork
from warmhold_entrypoint.running.beside import run_beside
from warmhold_entrypoint.running.groundwork import Groundwork
from warmhold_entrypoint.running.loop import Loop
from warmhold_entrypoint.running.phases import Phases
from warmhold_entrypoint.settings import Settings, read_settings
from warmhold_entrypoint.snapshot_mode.snapshots import Candidate, Snapshots, find_obstacle
from warmhold_entrypoint.start import write_command
from warmhold_entrypoint.weight_cache import holder, holder_program
from warmhold_entrypoint.weight_cache.backend import build_holder_argv
from warmhold_entrypoint.weight_cache.holder import ORDER_FILE, TAKEN_FILE, Holder, HolderError
from warmhold_entrypoint.weight_cache.ranks import Held, RankError

HELD = Held({"vllm_weight_cache_a.sock": 30, "vllm_weight_cache_b.sock": 30})
IPC, DISK = (Attempt(mode, ("vllm",)) for mode in ("ipc_cache", "disk"))
KEY = {"argument.dtype": "half", "content": "", "files": "[]"}


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def wanted(tmp_path: Path) -> Settings:
    environ = {"WARMHOLD_RUN_DIR": str(tmp_path), "WARMHOLD_WCACHE": "vllm"}
    return read_settings(environ, ("-tp", "2"))[0]


def make_plan(**changes: Any) -> Plan:
    given: dict[str, Any] = {
        **{"attempts": (), "rejections": (), "faults": (), "environment": {"A": "b"}},
        **{"model": "m", "model_directory": "/m", "cache_dir": "/c", "uid": None, "threads": 1},
        **{"kv_cache_bytes": None, "loader": {}, "snapshots": Snapshots(), "backend": "vllm"},
        **{"launch_key": KEY, "memory": Need({"u0": 100})},
    }
    return Plan(**{**given, **changes})


class Supervisor:
    """supervisord with the holder's program: whether it is up, and what it was told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.program = Program(True, 0)
        for act in ("start", "stop"):
            monkeypatch.setattr(
                supervision, f"{act}_program", lambda run, name, act=act: self.said.append(act)
            )
        monkeypatch.setattr(supervision, "read_program", lambda run, name: self.program)
        monkeypatch.setattr(holder.tree, "kill_members", lambda *_: [])


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    return Supervisor(monkeypatch)


def answer(monkeypatch: pytest.MonkeyPatch, *answers: Held | RankError) -> None:
    """What the processes say, one time after the other; the last one stays."""
    left = list(answers)

    def ask(*_: object) -> Held:
        found = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(found, RankError):
            raise found
        return found

    monkeypatch.setattr(holder, "ask_ranks", ask)
    monkeypatch.setattr(holder, "probe_health", lambda *_: None)


def start(settings: Settings, plan: Plan) -> Held:
    return Holder(lambda: None).start(settings, plan, threading.Event())


def test_a_holder_is_ordered_with_all_that_it_needs(
    supervisor: Supervisor, wanted: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "holder"
    folder.mkdir()
    (folder / "vllm_weight_cache_old.sock").touch()
    answer(monkeypatch, RankError("0 of 2", gone=True), HELD)
    monkeypatch.setattr(holder, "_START_POLL_S", 0.0)
    assert start(wanted, make_plan()) == HELD
    assert supervisor.said == ["start"] and list(folder.iterdir()) == []
    order = json.loads((tmp_path / ORDER_FILE).read_text())
    assert order["argv"] == list(build_holder_argv(wanted, "/m", order["port"]))
    assert (order["key"], order["environment"], order["uid"]) == (KEY, {"A": "b"}, os.getuid())
    assert (tmp_path / ORDER_FILE).stat().st_mode & 0o777 == 0o600


def test_a_holder_that_ends_or_is_late_is_ended_with_the_reason(
    supervisor: Supervisor, wanted: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, RankError("0 of 2", gone=True))
    late = read_settings(
        {"WARMHOLD_RUN_DIR": str(tmp_path), "WARMHOLD_READY_TIMEOUT_S": "0"}, ("-tp", "2")
    )[0]
    with pytest.raises(HolderError, match="not ready within 0 s: 0 of 2"):
        start(late, make_plan())
    supervisor.program = Program(False, 9)
    with pytest.raises(HolderError, match="ended with 9 before it was ready") as caught:
        start(wanted, make_plan())
    assert caught.value.rejection.code == "ipc_cache.holder"
    assert supervisor.said == ["start", "stop", "start", "stop"]
    assert not (tmp_path / ORDER_FILE).exists()


def test_a_stop_leaves_the_holder_to_supervisord(
    supervisor: Supervisor, wanted: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, RankError("0 of 2", gone=True))
    stop = threading.Event()
    stop.set()
    with pytest.raises(HolderError, match="stopped on request"):
        Holder(lambda: None).start(wanted, make_plan(), stop)
    assert supervisor.said == ["start"]


def test_a_supervisord_that_does_not_answer_is_a_reason(
    wanted: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder.tree, "kill_members", lambda *_: [])
    with pytest.raises(HolderError, match="supervisord, startProcess preload"):
        start(wanted, make_plan())
    with pytest.raises(SupervisionError):
        supervision.read_program(wanted.env.run_dir, "preload")


def test_only_the_holder_that_the_plan_wants_is_taken(
    wanted: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(plan: Plan) -> Held | None:
        return Holder(lambda: None).look(wanted, plan)

    answer(monkeypatch, HELD)
    assert look(make_plan()) is None, "there is none yet"
    told = {"argv": build_holder_argv(wanted, "/m", 7), "port": 7, "key": KEY}
    (tmp_path / TAKEN_FILE).write_text(json.dumps(told))
    assert look(make_plan()) == HELD
    assert look(make_plan(launch_key={**KEY, "files": '["other"]'})) is None
    assert look(make_plan(model_directory="/other")) is None
    answer(monkeypatch, RankError("1 of 2"))
    assert look(make_plan()) is None


def test_an_order_counts_once(tmp_path: Path) -> None:
    assert holder_program.take_order(tmp_path) is None
    (tmp_path / ORDER_FILE).write_text('{"port": 7}')
    assert holder_program.take_order(tmp_path) == {"port": 7}
    assert holder_program.take_order(tmp_path) is None
    assert json.loads((tmp_path / TAKEN_FILE).read_text()) == {"port": 7}


def test_the_program_becomes_upstreams_without_rights_and_without_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executed: list[Any] = []

    def execve(*given: Any) -> None:
        executed.append(given)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setenv("WARMHOLD_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("WARMHOLD_API_KEY", "hush")
    write_command(tmp_path, ("--port", "8000"))
    with pytest.raises(SystemExit) as ended:
        holder_program.main()
    assert ended.value.code == Exit.MODE_UNAVAILABLE and not executed
    order = {"argv": ["vllm", "preload"], "uid": 5, "environment": {"VLLM_PLUGINS": "warmhold"}}
    (tmp_path / ORDER_FILE).write_text(json.dumps(order))
    with pytest.raises(KeyboardInterrupt):
        holder_program.main()
    ((_, argv, environment),) = executed
    assert argv[-4:] == ["5", "30632", "vllm", "preload"] and argv[3].endswith("launcher.py")
    assert environment["VLLM_PLUGINS"] == "warmhold"
    assert "hush" not in environment.values()


class Ground:
    """A groundwork whose holder and GPU memory are told what to say."""

    def __init__(self, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
        self.acts: list[Any] = []
        self.there: Held | None = HELD
        self.missing = ""
        self.work = Groundwork(loop)
        owned = self.work._holder
        monkeypatch.setattr(owned, "look", lambda *_: self.acts.append("look") or self.there)
        monkeypatch.setattr(owned, "end", lambda *_: self.acts.append("end"))
        monkeypatch.setattr(owned, "start", lambda *_: self.acts.append("start") or HELD)
        monkeypatch.setattr(owned, "watch", lambda *_: self.acts.append("watch"))
        monkeypatch.setattr(groundwork, "wait_for_memory", self.wait)

    def wait(self, need: Need, *_: object) -> str:
        self.acts.append(dict(need.by_uuid))
        return self.missing


@pytest.fixture
def ground(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> Ground:
    return Ground(loop, monkeypatch)


def test_what_is_held_need_not_be_free(ground: Ground, wanted: Settings) -> None:
    assert ground.work.prepare(wanted, make_plan(), IPC) is None
    assert ground.acts == ["look", {"u0": 70}, "watch"]
    found = ground.work.summarise(Phases({"weights": 1.5}, 9.0))
    assert found and (found["mode"], found["bytes"], found["seconds"]) == ("ipc_cache", 60, 1.5)


def test_what_is_not_told_is_not_waited_for(ground: Ground, wanted: Settings) -> None:
    ground.there = Held({"vllm_weight_cache_a.sock": None})
    assert ground.work.prepare(wanted, make_plan(), IPC) is None
    assert ground.acts == ["look", {}, "watch"]


def test_a_holder_starts_when_what_was_there_is_gone(ground: Ground, wanted: Settings) -> None:
    ground.there = None
    assert ground.work.prepare(wanted, make_plan(), IPC) is None
    assert ground.acts == ["look", "end", {"u0": 100}, "start", "watch"]


def test_a_start_from_disk_has_no_second_copy_beside_it(ground: Ground, wanted: Settings) -> None:
    assert ground.work.prepare(wanted, make_plan(), DISK) is None
    assert ground.acts == ["end", {"u0": 100}]
    assert ground.work.summarise(Phases({}, 1.0)) is None


def test_the_vaults_engine_waits_for_memory_alone(ground: Ground, wanted: Settings) -> None:
    assert ground.work.prepare(wanted, make_plan(backend="vault"), IPC) is None
    assert ground.acts == [{"u0": 100}]
    back = Attempt("snapshot", (), "one")  # waits while it works
    assert ground.work.prepare(wanted, make_plan(backend="vault"), back) is None
    assert len(ground.acts) == 1


def test_too_little_memory_explains_a_start_that_failed(ground: Ground, wanted: Settings) -> None:
    ground.missing = "GPU u0 lacks 3 MiB"
    assert ground.work.prepare(wanted, make_plan(), IPC) is None
    assert ground.work.explain("ended") == "ended (gpu.memory: GPU u0 lacks 3 MiB)"
    ground.work.summarise(Phases({}, 1.0))
    assert ground.work.explain("ended") == "ended", "it served"


def test_the_watch_tells_trouble_and_its_end(
    wanted: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken = threading.Semaphore(0)
    monkeypatch.setattr(holder, "_POLL_S", 0.01)
    slow, gone = RankError("no answer"), RankError("refused", gone=True)
    told: list[str] = []
    watched = Holder(lambda: (told.append(watched.trouble), woken.release())[1])
    answer(monkeypatch, slow, HELD, slow, slow, HELD, gone)
    watched.watch(wanted)
    for _ in range(3):
        assert woken.acquire(timeout=60)
    watched.rest()
    assert told == ["no answer", "", "refused"] and watched.trouble == ""


def test_work_beside_the_loop_is_told_of_a_stop(loop: Loop) -> None:
    assert run_beside(loop, lambda stop: stop.is_set()) is False
    with pytest.raises(HolderError, match="why"):
        run_beside(loop, lambda stop: (_ for _ in ()).throw(HolderError("why")))
    loop.stop_asked = True
    loop.wake()
    assert run_beside(loop, lambda stop: stop.wait(60)) is True


def test_what_is_shared_by_cuda_ipc_has_no_snapshot(wanted: Settings) -> None:
    from warmhold_entrypoint.gpus.gpu import Gpu, Gpus

    gpus = Gpus("580", True, (Gpu("u0", 1, "9.0", "H200"),))
    candidate = Candidate((), {}, {}, (), {}, "/m", gpus)
    found = find_obstacle(wanted, candidate)
    assert found and found.code == "snapshot.backend" and "vault" in found.remedy
