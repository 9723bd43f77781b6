# SPDX-License-Identifier: Apache-2.0
"""The order of a snapshot, and every step failing: the engine is resumed, no artifact is left."""

import itertools
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from criu_script import call_script
from warmhold_snapshot import check, compression, create, criu, cuda, frozen
from warmhold_snapshot.artifact import Store
from warmhold_snapshot.check import Found
from warmhold_snapshot.errors import SnapshotError
from warmhold_snapshot.flat import FlatFiles, Weights
from warmhold_snapshot.scan import Scan

RIGHTS = Found((1 << 40) - 1, 0, "4.2.1", "", 1 << 40, "/", 1 << 22)
LIMITS = create.Limits(settle_s=0.2)
IDENTITY = {"kernel": "k"}


def start(argv: list[str], writer: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, start_new_session=True
    )


class Recorder:
    """An engine that only writes down what it was told."""

    def __init__(self, events: list[str], failing: str = "") -> None:
        self.events, self.failing = events, failing

    def _do(self, name: str) -> None:
        self.events.append(name)
        if name == self.failing:
            raise RuntimeError(f"{name} failed")

    def hold(self) -> None:
        self._do("hold")

    def canary(self) -> object:
        self._do("canary")
        return [{"tokens": [1, 2, 3]}]

    def quiesce(self) -> None:
        self._do("quiesce")

    def resume(self) -> None:
        self._do("resume")


@pytest.fixture
def root() -> Iterator[int]:
    """A process with its stdout in our pipe, and nothing that is in the way."""
    reader, writer = os.pipe()
    code = "import signal; print('ready', flush=True); signal.pause()"
    argv = [sys.executable, "-c", code]
    with start(argv, writer) as child:
        os.close(writer)
        assert os.read(reader, 5) == b"ready"
        yield child.pid
        child.kill()
    os.close(reader)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "snapshots")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What happened, with a criu that writes one image and calls its script, as the real one."""
    seen: list[str] = []

    def run(
        argv: Sequence[str], timeout_s: float, log: Path, fds: Sequence[int], *_: object
    ) -> criu.Outcome:
        seen.append("dump")
        if "dump fails" in seen:
            log.write_text("Error (a.c:1): no way\n")
            raise SnapshotError("snapshot.criu", "no way", "", ["Error (a.c:1): no way"])
        images = Path(argv[argv.index("--images-dir") + 1])
        (images / "pages-1.img").write_bytes(b"p" * 5000)
        script = argv[argv.index("--action-script") + 1]
        for action in ("pre-dump", "post-dump"):
            if call_script(script, action, fds):
                raise SnapshotError("snapshot.criu", "the script said no")
        return criu.Outcome(0.1, "Frozen time: 250000 us\n")

    monkeypatch.setattr(criu, "run", run)
    shm = tmp_path / "shm"
    shm.mkdir()
    monkeypatch.setattr(frozen, "look", partial(frozen.look, shm_folder=shm))
    monkeypatch.setattr(check, "read_found", lambda folder: RIGHTS)
    real_scan = create.scan
    monkeypatch.setattr(create, "scan", lambda *given: seen.append("scan") or real_scan(*given))
    return seen


def make(root: int, events: list[str], store: Store, failing: str = "") -> create.Report:
    engine = Recorder(events, failing)
    return create.create(root, engine, store, "one", IDENTITY, notes={"n": "1"}, limits=LIMITS)


def test_the_order(root: int, events: list[str], store: Store) -> None:
    report = make(root, events, store)
    # What was just started may need more than one look until it stands still.
    acts = [name for name, _ in itertools.groupby(events)]
    assert acts == ["scan", "hold", "canary", "quiesce", "scan", "dump", "resume"]
    manifest = store.read("one")
    store.verify(manifest)
    assert manifest.root_pid == root and manifest.identity == IDENTITY
    assert manifest.canary == [{"tokens": [1, 2, 3]}] and manifest.notes == {"n": "1"}
    assert len(manifest.stdio) == 1 and manifest.shm == ()
    assert report.frozen_s == 0.25 and report.image_bytes == manifest.image_bytes
    assert sorted(path.name for path in report.path.iterdir()) == [
        "images",
        "manifest.json",
        "shm.img",
    ]
    assert {"check", "hold", "canary", "quiesce", "scan", "dump", "resume"} <= set(report.timings)


def test_memory_in_lz4(root: int, events: list[str], store: Store) -> None:
    report = create.create(
        root, Recorder(events), store, "one", IDENTITY, compress=True, limits=LIMITS
    )
    assert [path.name for path in (report.path / "images").iterdir()] == ["pages-1.img.lz4"]
    manifest = store.read("one")
    store.verify(manifest)
    assert manifest.bytes_by_kind["pages"] == report.bytes_by_kind["pages"] < 500
    assert events[-1] == "resume" and "compress" in report.timings


def test_no_room_for_lz4(
    root: int, events: list[str], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "_LIBRARY", "libabsent.so.1")
    with pytest.raises(SnapshotError) as caught:
        create.create(root, Recorder(events), store, "one", IDENTITY, compress=True, limits=LIMITS)
    assert caught.value.code == "snapshot.disk" and events[-1] == "resume"
    assert [path.name for path in store.folder.iterdir()] == [".key"]


def test_an_engine_on_a_gpu(
    root: int, events: list[str], store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argvs: list[Sequence[str]] = []
    variables: list[object] = []
    run = criu.run

    def look(argv: Sequence[str], *rest: object) -> criu.Outcome:
        argvs.append(argv)
        variables.append(rest[-1])
        return run(argv, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(criu, "run", look)
    monkeypatch.setattr(cuda, "find_users", tuple)
    (tmp_path / "cuda_plugin.so").write_bytes(b"")
    monkeypatch.setattr(cuda.shutil, "which", lambda name: f"/bin/{name}")

    @contextmanager
    def awake(plugins: Path | None) -> Iterator[dict[str, str]]:
        assert plugins == tmp_path
        events.append("awake")
        yield {"HOLDER": "there"}
        events.append("asleep")

    monkeypatch.setattr(create.awake, "awake", awake)
    create.create(root, Recorder(events), store, "one", IDENTITY, plugins=tmp_path, limits=LIMITS)
    users = store.read("one").cuda
    assert users and root in users
    named = {"HOLDER": "there", "WARMHOLD_CUDA_PIDS": ",".join(map(str, users))}
    assert variables == [named]
    (argv,) = argvs
    assert argv[argv.index("--libdir") + 1] == str(tmp_path)
    assert events.index("awake") < events.index("hold") and events[-2:] == ["resume", "asleep"]
    events.append("dump fails")

    def bring_back(pids: Sequence[int], holder: object) -> None:
        assert (tuple(pids), holder) == (users, {"HOLDER": "there"})
        events.append("bring back")

    monkeypatch.setattr(cuda, "bring_back", bring_back)
    with pytest.raises(SnapshotError) as caught:
        create.create(root, Recorder(events), store, "two", IDENTITY, plugins=tmp_path)
    assert caught.value.code == "snapshot.dump" and events[-2:] == ["bring back", "resume"]


@pytest.mark.parametrize("failing", ["hold", "canary", "quiesce"])
def test_the_engine_refuses(root: int, events: list[str], store: Store, failing: str) -> None:
    with pytest.raises(SnapshotError) as caught:
        make(root, events, store, failing)
    assert caught.value.code == "snapshot.engine" and f"{failing} failed" in caught.value.detail
    assert events[-2:] == [failing, "resume"] and "dump" not in events
    assert [path.name for path in store.folder.iterdir()] == [".key"]


def test_the_dump_fails(root: int, events: list[str], store: Store) -> None:
    events.append("dump fails")
    with pytest.raises(SnapshotError) as caught:
        make(root, events, store)
    assert caught.value.code == "snapshot.dump" and caught.value.lines
    assert events[-2:] == ["dump", "resume"]
    assert [path.name for path in store.folder.iterdir()] == [".key"]


def test_resume_fails(root: int, events: list[str], store: Store) -> None:
    with pytest.raises(SnapshotError) as caught:
        make(root, events, store, "resume")
    assert caught.value.code == "snapshot.resume"
    assert store.names() == []


def test_resume_fails_after_something_else(root: int, events: list[str], store: Store) -> None:
    events.append("dump fails")
    with pytest.raises(SnapshotError) as caught:
        make(root, events, store, "resume")
    assert caught.value.code == "snapshot.resume" and "no way" in caught.value.detail


def test_a_right_is_missing(
    root: int, events: list[str], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "read_found", lambda folder: replace(RIGHTS, seccomp=2))
    with pytest.raises(SnapshotError) as caught:
        make(root, events, store)
    assert caught.value.code == "snapshot.rights" and events == []


def hold_memfd(name: str) -> Iterator[int]:
    """A process that holds a memfd of that name all the time."""
    code = f"import os, signal; os.memfd_create({name!r}); print('x', flush=True); signal.pause()"
    reader, writer = os.pipe()
    argv = [sys.executable, "-c", code.replace("os.mem", "fd = os.mem")]
    with start(argv, writer) as child:
        os.close(writer)
        assert os.read(reader, 1) == b"x"
        yield child.pid
        child.kill()
    os.close(reader)


def test_weights_that_are_not_given_back(events: list[str], store: Store) -> None:
    for root in hold_memfd("weights-1"):
        with pytest.raises(SnapshotError) as caught:
            make(root, events, store)
        assert caught.value.code == "snapshot.fds" and "weights-1" in caught.value.detail
        assert events[:4] == ["scan", "hold", "canary", "quiesce"] and events[-1] == "resume"
        assert "dump" not in events and store.names() == []


def test_what_comes_while_frozen_is_found_by_the_script(
    events: list[str], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(create, "scan", lambda *given: Scan())
    for root in hold_memfd("weights-1"):
        with pytest.raises(SnapshotError) as caught:
            make(root, events, store)
        assert caught.value.code == "snapshot.fds" and "of the frozen engine" in caught.value.detail
        assert events[-2:] == ["dump", "resume"] and store.names() == []


@pytest.fixture
def weights() -> Iterator[list[Weights]]:
    fd = os.memfd_create("weights")
    os.pwrite(fd, b"w" * 8192, 0)
    yield [Weights("0123456789abcdef", b"{}", ((fd, 8192),))]
    os.close(fd)


def make_with(
    root: int, events: list[str], store: Store, weights: list[Weights], name: str = "one"
) -> create.Report:
    return create.create(
        root, Recorder(events), store, name, IDENTITY, weights=weights, limits=LIMITS
    )


def test_weights_are_written_once_the_engine_serves_again(
    root: int,
    events: list[str],
    store: Store,
    weights: list[Weights],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = FlatFiles.write
    monkeypatch.setattr(
        FlatFiles, "write", lambda *given: events.append("weights") or write(*given)
    )
    report = make_with(root, events, store, weights)
    assert events[-2:] == ["resume", "weights"]
    assert report.weights_bytes == 8192 and "weights" in report.timings
    assert store.read("one").weights == {"0123456789abcdef": 8192}
    place = store.flat.folder / "0123456789abcdef"
    inode = place.stat().st_ino
    make_with(root, events, store, weights, "two")
    assert place.stat().st_ino == inode, "it is reused"
    store.remove("one")
    assert store.flat.holds(weights[0])
    make_with(root, events, store, [], "two")
    assert not place.exists(), "no artifact refers to it any more"


def test_weights_that_cannot_be_read_are_left_out(
    root: int, events: list[str], store: Store, weights: list[Weights]
) -> None:
    others = [*weights, replace(weights[0], id="fedcba9876543210")]

    def write(given: Store, item: Weights) -> None:
        if item in weights:
            raise SnapshotError("snapshot.weights-absent", "the GPU is full")
        given.flat.write(item)

    def make_by(write: create.Write) -> create.Report:
        given = (root, Recorder(events), store, "one", IDENTITY)
        return create.create(*given, weights=others, write=write, limits=LIMITS)

    report = make_by(write)
    assert report.notes[-1] == "no flat weights: the GPU is full"
    assert store.read("one").weights == {"fedcba9876543210": 8192}
    assert report.weights_bytes == 8192 and store.rows()[0].weights == "flat"

    def refuse(given: Store, item: Weights) -> None:
        raise SnapshotError("snapshot.gone", "something else")

    store.remove("one")
    with pytest.raises(SnapshotError, match="something else"):
        make_by(refuse)
    assert store.names() == [] and events[-1] == "resume"


def test_without_room_for_them_they_are_left_out(
    root: int,
    events: list[str],
    store: Store,
    weights: list[Weights],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spare = 256 << 20  # for compile caches, which lie on the same volume
    left = SimpleNamespace(free=spare + 8191)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: left)
    report = make_with(root, events, store, weights)
    assert report.notes[-1].startswith("no flat weights: 257 MiB free in ")
    assert store.read("one").weights == {} and not store.flat.holds(weights[0])
    left.free += 1
    make_with(root, events, store, weights, "two")
    assert store.read("two").weights == {"0123456789abcdef": 8192}
    left.free = 0
    assert not make_with(root, events, store, weights, "three").notes, "they are there"


def test_a_disk_that_is_full_after_all(
    root: int, events: list[str], store: Store, weights: list[Weights]
) -> None:
    kept, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))  # all else is smaller
    try:
        report = make_with(root, events, store, weights)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (kept, hard))
    assert "no flat weights" in report.notes[-1] and events[-1] == "resume"
    store.verify(store.read("one"))
    assert list((store.folder / ".weights").iterdir()) == []


def test_interrupted_in_the_middle(root: int, events: list[str], store: Store) -> None:
    class Interrupted(Recorder):
        def quiesce(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        create.create(root, Interrupted(events), store, "one", IDENTITY, limits=LIMITS)
    assert events[-1] == "resume" and store.names() == []


def test_no_engine(events: list[str], store: Store) -> None:
    with pytest.raises(SnapshotError) as caught:
        make(2**22 + 5, events, store)
    assert caught.value.code == "snapshot.no-process" and "hold" not in events
