# SPDX-License-Identifier: Apache-2.0
"""Restores without criu: what is looked at before, and that a failure leaves nothing."""

import ctypes
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from criu_script import call_script
from warmhold_snapshot import compression, criu, pids, restore
from warmhold_snapshot.artifact import Store, describe_files
from warmhold_snapshot.errors import SnapshotError
from warmhold_snapshot.images import is_memory
from warmhold_snapshot.manifest import FORMAT, Manifest
from warmhold_snapshot.pids import Process
from warmhold_snapshot.scan import OpenFile
from warmhold_snapshot.shm import FOLDER, ShmFile

RING, REMAP = f"psm_warmhold_test_{os.getpid()}", f"link_remap.warmhold_test_{os.getpid()}"
FREE = 2**22 - 5
LIMITS = restore.Limits(free_s=0.05)
_SUBREAPER = 36


@pytest.fixture(autouse=True)
def subreaper() -> Iterator[None]:
    libc = ctypes.CDLL(None)
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    yield
    libc.prctl(_SUBREAPER, 0, 0, 0, 0)
    for name in (RING, REMAP):
        (FOLDER / name).unlink(missing_ok=True)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "snapshots")


def make(store: Store, tmp_path: Path, compress: bool = False, **changes: Any) -> Manifest:
    needed = tmp_path / "needed"
    needed.write_bytes(b"12345")
    with store.draft("one") as draft:
        (draft.folder / "images" / "pages-1.img").write_bytes(b"p" * 5000)
        if compress:
            compression.compress(draft.folder / "images")
        (draft.folder / "shm.img").write_bytes(b"r" * 100)
        entry = ShmFile(RING, 8192, 0o600, os.getuid(), os.getgid(), 0, ((4096, 100),))
        remap = ShmFile(REMAP, 8192, 0o600, os.getuid(), os.getgid(), same_as=RING)
        manifest = Manifest(
            format=FORMAT,
            name="one",
            created="2026-01-01T00:00:00Z",
            identity={"kernel": "k"},
            processes=(Process(FREE, 1, FREE, FREE, "vllm", 5, (FREE,)),),
            stdio=(70,),
            listeners=(),
            open_files=(OpenFile(str(needed), 5),),
            counts={},
            shm=(entry, remap),
            files=describe_files(draft.folder),
            bytes_by_kind={},
            bytes_by_process={},
            timings={},
        )
        manifest = msgspec.structs.replace(manifest, **changes)
        store.publish(draft, manifest)
    return manifest


class FakeCriu:
    """Sees what is there when criu would run, and then does what a test wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[list[str]] = []
        self.seen: list[str] = []
        self.error: BaseException | None = None
        self.child: subprocess.Popen[bytes] | None = None
        self.answers: list[tuple[str, int]] = []
        monkeypatch.setattr(criu, "run", self.run)

    def run(
        self,
        argv: Sequence[str],
        timeout_s: float,
        log: Path,
        pass_fds: Sequence[int],
        variables: Mapping[str, str],
    ) -> criu.Outcome:
        self.calls.append(list(argv))
        self.variables = variables
        self.seen = [name for name in (RING, REMAP) if (FOLDER / name).exists()]
        self.images = Path(argv[argv.index("--images-dir") + 1])
        self.pages = (self.images / "pages-1.img").read_bytes()
        if self.error:
            raise self.error
        if "--action-script" in argv:
            self.ask(argv[argv.index("--action-script") + 1], pass_fds)
        stdout = argv[argv.index("--inherit-fd") + 1].removeprefix("fd[").partition("]")[0]
        code = f"import os; os.write({stdout}, b'back'); os.read(0, 1)"
        self.child = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, pass_fds=pass_fds
        )
        Path(argv[argv.index("--pidfile") + 1]).write_text(f"{self.child.pid}\n")
        return criu.Outcome(0.1, "")

    def ask(self, script: str, pass_fds: Sequence[int]) -> None:
        for action in ("pre-restore", "post-restore"):
            self.answers.append((action, call_script(script, action, pass_fds)))
            if self.answers[-1][1]:
                raise SnapshotError("snapshot.criu", f"criu ended after {action}")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCriu:
    return FakeCriu(monkeypatch)


def refusal(store: Store, **options: Any) -> SnapshotError:
    with pytest.raises(SnapshotError) as caught:
        restore.restore(store, "one", 1, limits=LIMITS, **options)
    return caught.value


def test_a_restore(store: Store, fake: FakeCriu, tmp_path: Path) -> None:
    make(store, tmp_path)
    reader, writer = os.pipe()
    restored = restore.restore(store, "one", writer, identity={"kernel": "k"}, limits=LIMITS)
    os.close(writer)
    assert os.read(reader, 4) == b"back"
    assert fake.child and restored.pid == fake.child.pid
    assert fake.seen == [RING, REMAP], "both were there for criu"
    assert (FOLDER / RING).exists() and not (FOLDER / REMAP).exists()
    assert (FOLDER / RING).read_bytes()[4096:4196] == b"r" * 100
    assert f"fd[{writer}]:pipe:[70]" in fake.calls[0]
    assert set(restored.phases) == {"verify", "collisions", "shm", "criu"}
    fake.child.communicate(b"x")
    assert select.select([restored.pidfd], [], [], 10)[0]
    os.close(restored.pidfd)
    os.close(reader)


def test_memory_in_lz4(store: Store, fake: FakeCriu, tmp_path: Path) -> None:
    make(store, tmp_path, compress=True)
    reader, writer = os.pipe()
    restored = restore.restore(store, "one", writer, limits=LIMITS)
    assert fake.pages == b"p" * 5000 and not fake.images.exists()
    assert set(restored.phases) == {"verify", "collisions", "expand", "shm", "criu"}
    assert fake.child
    fake.child.communicate(b"x")
    for descriptor in (restored.pidfd, reader, writer):
        os.close(descriptor)
    store.verify(store.read("one"))
    fake.error = SnapshotError("snapshot.criu", "no such file")
    assert refusal(store).code == "snapshot.restore"
    assert {path.name for path in store.folder.iterdir()} == {".key", "one"}


@pytest.mark.parametrize(("users", "said"), [(None, {}), ((7,), {"WARMHOLD_CUDA_PIDS": "7"})])
def test_who_uses_a_gpu_is_told(
    store: Store, fake: FakeCriu, tmp_path: Path, users: object, said: object
) -> None:
    make(store, tmp_path, cuda=users)
    fake.error = SnapshotError("snapshot.criu", "no way")
    refusal(store)
    assert fake.variables == said


def test_criu_fails(store: Store, fake: FakeCriu, tmp_path: Path) -> None:
    make(store, tmp_path)
    fake.error = SnapshotError("snapshot.criu", "no such file", "", ["Error (x.c:1)"])
    error = refusal(store)
    assert (error.code, error.lines) == ("snapshot.restore", ("Error (x.c:1)",))
    assert fake.seen == [RING, REMAP]
    assert not (FOLDER / RING).exists() and not (FOLDER / REMAP).exists()
    assert {path.name for path in store.path("one").iterdir()} == {
        *("images", "manifest.json", "shm.img"),
    }


def test_criu_hangs(store: Store, fake: FakeCriu, tmp_path: Path) -> None:
    make(store, tmp_path)
    fake.error = SnapshotError("snapshot.timeout", "it did not end")
    assert refusal(store).code == "snapshot.timeout"
    assert not (FOLDER / RING).exists()


def test_damage_is_found_first(store: Store, fake: FakeCriu, tmp_path: Path) -> None:
    make(store, tmp_path)
    (store.path("one") / "shm.img").write_bytes(b"x" * 100)
    assert refusal(store).code == "snapshot.damaged"
    assert fake.calls == [] and not (FOLDER / RING).exists()


def test_damaged_memory_never_runs(store: Store, fake: FakeCriu, tmp_path: Path) -> None:
    """criu reads it while it is verified, and ends what it has made."""
    make(store, tmp_path)
    pages = store.path("one") / "images" / "pages-1.img"
    pages.write_bytes(b"p" * 4999 + b"x")
    error = refusal(store)
    assert (error.code, error.lines) == (
        "snapshot.damaged",
        (f"images/{pages.name} has other bytes",),
    )
    assert fake.answers == [("pre-restore", 0), ("post-restore", 1)]
    assert fake.child is None and not (FOLDER / RING).exists()
    assert {path.name for path in store.path("one").iterdir()} == {
        *("images", "manifest.json", "shm.img"),
    }


def test_sound_memory_is_waited_for(
    store: Store, fake: FakeCriu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(store, tmp_path)
    verify, asked = Store.verify, []

    def slow(*given: Any, among: Any = None, **named: Any) -> None:
        while among is is_memory and ("pre-restore", 0) not in fake.answers:
            time.sleep(0.01)
        asked.append(len(fake.answers))
        verify(*given, among=among, **named)

    monkeypatch.setattr(Store, "verify", slow)
    reader, writer = os.pipe()
    restored = restore.restore(store, "one", writer, limits=LIMITS)
    assert asked == [0, 1] and fake.answers == [("pre-restore", 0), ("post-restore", 0)]
    assert fake.child
    fake.child.communicate(b"x")
    for descriptor in (restored.pidfd, reader, writer):
        os.close(descriptor)


def test_a_stop_ends_the_verifying(store: Store, fake: FakeCriu, tmp_path: Path) -> None:
    make(store, tmp_path)
    done: list[int] = []

    def stop(done_bytes: int, total_bytes: int) -> None:
        done.append(done_bytes)
        if done_bytes == 5000:  # the memory's
            raise SnapshotError("snapshot.stopped", "a stop")

    assert refusal(store, progress=stop).code == "snapshot.stopped"
    assert 5000 in done and fake.child is None


def test_nobody_waits_for_a_verdict_once_criu_has_failed(
    store: Store, fake: FakeCriu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(store, tmp_path)
    verify, left = Store.verify, []

    def endless(*given: Any, among: Any = None, progress: Any = None, **named: Any) -> None:
        while among is is_memory:
            time.sleep(0.01)
            try:
                progress(0, 5000)
            except SnapshotError as error:
                left.append(error.code)
                raise
        verify(*given, among=among, **named)

    monkeypatch.setattr(Store, "verify", endless)
    fake.error = SnapshotError("snapshot.criu", "no such file")
    error = refusal(store, ready=lambda over: None if over.wait(60) else left.append("late"))
    assert (error.code, error.detail) == ("snapshot.restore", "no such file")
    assert left == ["snapshot.stopped"]
    assert "verdict" not in {thread.name for thread in threading.enumerate()}


def test_without_checksums_nobody_is_asked(store: Store, fake: FakeCriu, tmp_path: Path) -> None:
    make(store, tmp_path)
    (store.path("one") / "images" / "pages-1.img").write_bytes(b"x" * 5000)
    fake.error = SnapshotError("snapshot.criu", "as far as this")
    assert refusal(store, checksums=False).detail == "as far as this"
    assert "--action-script" not in fake.calls[0]


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("compress", [False, True])
def test_what_has_to_be_ready_is_waited_for_before_anything_runs(
    store: Store, fake: FakeCriu, tmp_path: Path, compress: bool, checksums: bool
) -> None:
    make(store, tmp_path, compress)

    def refuse(over: threading.Event) -> None:
        while not fake.answers:  # criu is at work
            time.sleep(0.01)
        raise SnapshotError("snapshot.stopped", "never")

    error = refusal(store, ready=refuse, checksums=checksums)
    assert (error.code, error.detail) == ("snapshot.stopped", "never")
    assert fake.answers == [("pre-restore", 0), ("post-restore", 1)] and fake.child is None
    reader, writer = os.pipe()
    asked: list[int] = []
    restored = restore.restore(
        store, "one", writer, limits=LIMITS, checksums=checksums, ready=lambda over: asked.append(1)
    )
    assert asked == [1] and fake.child
    fake.child.communicate(b"x")
    for descriptor in (restored.pidfd, reader, writer):
        os.close(descriptor)


def test_another_identity(store: Store, fake: FakeCriu, tmp_path: Path) -> None:
    make(store, tmp_path)
    assert refusal(store, identity={"kernel": "l"}).code == "snapshot.identity-mismatch"
    assert fake.calls == []


def test_a_number_is_taken(store: Store, fake: FakeCriu, tmp_path: Path) -> None:
    make(store, tmp_path, processes=(Process(os.getpid(), 1, 1, 1, "vllm", 5, (os.getpid(),)),))
    error = refusal(store)
    assert error.code == "snapshot.pids-taken" and str(os.getpid()) in error.detail
    assert fake.calls == []


def test_of_thousands_of_numbers_some_are_told(
    store: Store, fake: FakeCriu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A status or an answer with all of them would be larger than what a socket takes."""
    taken = dict.fromkeys(range(3001, 9001), "thread of VLLM::EngineCore (3001)")
    monkeypatch.setattr(pids, "wait_until_free", lambda *given: taken)
    make(store, tmp_path)
    error = refusal(store)
    assert error.detail.startswith("6000 process or thread id(s) are taken: 3001 is thread of")
    assert error.detail.endswith("and 5980 more") and len(error.detail) < 5000


def test_the_port_is_taken(store: Store, fake: FakeCriu, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        make(store, tmp_path, listeners=(("0.0.0.0", port),))
        assert refusal(store).code == "snapshot.port-taken"
    assert fake.calls == []


def test_a_file_changed_or_went(store: Store, fake: FakeCriu, tmp_path: Path) -> None:
    make(store, tmp_path)
    (tmp_path / "needed").write_bytes(b"123456")
    error = refusal(store)
    assert error.code == "snapshot.file-changed" and "6 bytes now, 5 then" in error.detail
    (tmp_path / "needed").unlink()
    assert refusal(store).code == "snapshot.file-changed"
    assert fake.calls == []


def test_a_second_restore_at_the_same_time(store: Store, fake: FakeCriu, tmp_path: Path) -> None:
    make(store, tmp_path)
    from warmhold_snapshot.folder import ALONE, locked

    with locked(FOLDER, ALONE, "busy"):
        assert refusal(store).code == "snapshot.busy"
        assert not restore.wait_for_others(0.05)
    assert restore.wait_for_others(10)


def test_absent(store: Store, fake: FakeCriu) -> None:
    assert refusal(store).code == "snapshot.absent"


def test_only_for_a_subreaper(store: Store, fake: FakeCriu, tmp_path: Path) -> None:
    make(store, tmp_path)
    ctypes.CDLL(None).prctl(_SUBREAPER, 0, 0, 0, 0)
    assert refusal(store).code == "snapshot.subreaper"
