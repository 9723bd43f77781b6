# SPDX-License-Identifier: Apache-2.0
"""Artifacts: whole or not there, every damage found, nothing in use removed."""

import errno
import fcntl
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from warmhold_snapshot import checksum, cli, images, manifest
from warmhold_snapshot.artifact import Store, describe_files
from warmhold_snapshot.errors import SnapshotError
from warmhold_snapshot.flat import Weights
from warmhold_snapshot.manifest import FORMAT, Manifest
from warmhold_snapshot.mark import clear_mark, read_mark, write_mark
from warmhold_snapshot.pids import Process
from warmhold_snapshot.scan import OpenFile
from warmhold_snapshot.shm import ShmFile

PIECE_BYTES = 1 << 16
CONTENT = {
    "images/pages-1.img": os.urandom(PIECE_BYTES + 5000),
    "images/pagemap-3001.img": b"\1\2\3\4" * 2 + b"\2\0\0\0" + b"\x08\x01",
    "images/core-3001.img": b"core" * 100,
    "images/empty.img": b"",
    "shm.img": b"ring" * 4096,
}


def make(
    store: Store,
    name: str = "one",
    created: str = "2026-01-01T00:00:00Z",
    weights: Sequence[Weights] = (),
) -> Manifest:
    with store.draft(name) as draft:
        for path, content in CONTENT.items():
            (draft.folder / path).write_bytes(content)
        files = describe_files(draft.folder)
        for item in weights:
            store.flat.write(item)
        made = Manifest(
            format=FORMAT,
            name=name,
            created=created,
            identity={"kernel": "k", "argv": "[]"},
            processes=(Process(3001, 1, 3001, 3001, "vllm", 5, (3001, 3002)),),
            stdio=(70,),
            listeners=(("0.0.0.0", 8000),),
            open_files=(OpenFile("/lib/a.so", 5),),
            counts={"pipe": 2},
            shm=(ShmFile("psm_1", 8192, 0o600, 0, 0, 0, ((0, 4096),)),),
            files=files,
            bytes_by_kind=images.measure_by_kind({f.name: f.size_bytes for f in files}),
            bytes_by_process=images.measure_by_process(draft.folder / "images"),
            timings={"pause": 1.5},
            canary=[{"tokens": [1, 2]}],
            notes={"weights": "w"},
            weights={item.id: item.size_bytes for item in weights},
        )
        store.publish(draft, made)
    return made


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "PIECE_BYTES", PIECE_BYTES)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "snapshots")


def refusal(act: Callable[[], object]) -> SnapshotError:
    with pytest.raises(SnapshotError) as caught:
        act()
    return caught.value


# Making


def test_a_whole_artifact(store: Store) -> None:
    made = make(store)
    assert store.read("one") == made
    store.verify(made)
    folder = store.path("one")
    assert sorted(path.name for path in folder.iterdir()) == ["images", "manifest.json", "shm.img"]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert made.image_bytes == sum(len(content) for content in CONTENT.values())
    assert made.bytes_by_process == {3001: len(CONTENT["images/pages-1.img"])}
    assert made.bytes_by_kind["pages"] == len(CONTENT["images/pages-1.img"])
    assert made.ids() == {3001, 3002}


def test_a_failure_leaves_nothing(store: Store) -> None:
    with pytest.raises(KeyError), store.draft("one") as draft:
        (draft.folder / "images" / "pages-1.img").write_bytes(b"x")
        assert store.names() == []
        raise KeyError
    assert [path.name for path in store.folder.iterdir()] == [".key"]


def test_what_a_killed_maker_left_is_not_listed_and_goes(store: Store) -> None:
    left = store.folder / ".tmp-one-0123"
    (left / "images").mkdir(parents=True)
    assert store.rows() == []
    make(store)
    assert not left.exists()


def test_one_is_made_at_a_time(store: Store) -> None:
    with store.draft("one"):
        error = refusal(lambda: store.draft("two").__enter__())
        assert error.code == "snapshot.busy" and "another snapshot" in error.detail
    make(store, "two")


def test_what_is_being_made_is_not_swept(store: Store) -> None:
    with store.draft("one") as draft:
        assert store.sweep() == [] and draft.folder.exists()


def test_a_new_one_takes_its_predecessors_place(store: Store) -> None:
    make(store, created="2026-01-01T00:00:00Z")
    write_mark(store.path("one"), SnapshotError("snapshot.restore", "it did not"), {})
    make(store, created="2026-01-02T00:00:00Z")
    assert store.read("one").created == "2026-01-02T00:00:00Z"
    assert read_mark(store.path("one")) is None
    assert sorted(path.name for path in store.folder.iterdir()) == [".key", "one"]


def test_a_predecessor_in_use_stays(store: Store) -> None:
    first = make(store)
    with store.using("one"):
        assert refusal(lambda: make(store, created="2027-01-01T00:00:00Z")).code == "snapshot.busy"
    assert store.read("one") == first


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", ".hidden", "-x", "x" * 65, "a b"])
def test_names(store: Store, name: str) -> None:
    assert refusal(lambda: store.path(name)).code == "snapshot.name"


# Damage


@pytest.mark.parametrize("path", CONTENT)
@pytest.mark.parametrize("damage", ["cut", "flip first", "flip last", "remove", "grow", "link"])
def test_each_file_damaged(store: Store, path: str, damage: str, tmp_path: Path) -> None:
    made = make(store)
    victim, content = store.path("one") / path, CONTENT[path]
    if not content and damage in ("cut", "flip first", "flip last"):
        damage = "grow"
    if damage == "cut":
        victim.write_bytes(content[:-1])
    elif damage.startswith("flip"):
        place = 0 if damage == "flip first" else len(content) - 1
        changed = bytearray(content)
        changed[place] ^= 1
        victim.write_bytes(changed)
    elif damage == "remove":
        victim.unlink()
    elif damage == "grow":
        victim.write_bytes(content + b"\0")
    else:
        victim.rename(tmp_path / "away")
        victim.symlink_to(tmp_path / "away")
    error = refusal(lambda: store.verify(made))
    assert error.code == "snapshot.damaged" and path in error.detail
    if not damage.startswith("flip"):
        assert refusal(lambda: store.verify(made, checksums=False)).code == "snapshot.damaged"


def test_metadata_alone_does_not_read_bytes(store: Store) -> None:
    made = make(store)
    victim = store.path("one") / "images/core-3001.img"
    victim.write_bytes(bytes(len(CONTENT["images/core-3001.img"])))
    store.verify(made, checksums=False)


def test_a_file_too_many(store: Store) -> None:
    made = make(store)
    (store.path("one") / "images" / "pages-2.img").write_bytes(b"x")
    assert "pages-2.img is not its own" in refusal(lambda: store.verify(made)).detail


def test_every_damage_is_listed(store: Store) -> None:
    made = make(store)
    for path in ("images/core-3001.img", "shm.img"):
        (store.path("one") / path).unlink()
    assert len(refusal(lambda: store.verify(made)).lines) == 2


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to every value that is no container."""
    if isinstance(value, dict | list) and value:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return [leaf for key, below in pairs for leaf in leaves(below, (*path, key))]
    return [path]


def change(value: object) -> object:
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, bool | type(None)):
        return 1
    return value + 1 if isinstance(value, int | float) else ["x"]


def test_the_manifest_edited_field_by_field(store: Store) -> None:
    make(store)
    place = store.path("one") / "manifest.json"
    good = place.read_bytes()
    paths = leaves(json.loads(good))
    assert len(paths) > 40
    for path in paths:
        document = json.loads(good)
        holder = document
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = change(holder[path[-1]])
        place.write_text(json.dumps(document))
        assert refusal(lambda: store.read("one")).code == "snapshot.damaged", path
    place.write_bytes(good)
    store.read("one")


@pytest.mark.parametrize("content", [b"", b"{}", b"null", b"\xff" * 10, b'{"seal": 1}', None])
def test_a_manifest_that_is_none(store: Store, content: bytes | None) -> None:
    make(store)
    place = store.path("one") / "manifest.json"
    place.unlink()
    if content is not None:
        place.write_bytes(content)
    assert refusal(lambda: store.read("one")).code == "snapshot.damaged"
    (row,) = store.rows()
    assert row.state == "damaged"


def test_a_manifest_cut_anywhere(store: Store) -> None:
    make(store)
    place = store.path("one") / "manifest.json"
    good = place.read_bytes()
    for length in range(0, len(good) - 2, 97):
        place.write_bytes(good[:length])
        assert refusal(lambda: store.read("one")).code == "snapshot.damaged"


def test_a_manifest_under_another_name_or_key(store: Store) -> None:
    make(store)
    store.path("one").rename(store.path("two"))
    assert "manifest of one" in refusal(lambda: store.read("two")).detail
    store.key = bytes(32)
    assert "its seal does not fit" in refusal(lambda: store.read("two")).detail


def test_another_format(store: Store) -> None:
    made = msgspec.structs.replace(make(store), format=FORMAT + 1)
    error = refusal(lambda: manifest.decode(manifest.encode(made, store.key), store.key))
    assert error.code == "snapshot.damaged" and "format" in error.detail


def test_absent(store: Store) -> None:
    for act in (store.read, store.remove, lambda name: store.using(name).__enter__()):
        assert refusal(lambda act=act: act("none")).code == "snapshot.absent"


# Marks, lists, removal


def fail(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_marks(store: Store) -> None:
    make(store)
    folder = store.path("one")
    assert read_mark(folder) is None
    write_mark(folder, SnapshotError("snapshot.pids-taken", "3001 is sh"), {"boot": "b"})
    mark = read_mark(folder)
    assert mark and (mark.code, mark.circumstances) == ("snapshot.pids-taken", {"boot": "b"})
    (row,) = store.rows()
    assert row.state == "failed" and "3001 is sh" in row.detail
    store.verify(store.read("one"))
    (folder / "failed.json").write_text("{")
    assert read_mark(folder) is not None, "a mark that cannot be read counts"
    clear_mark(folder)
    clear_mark(folder)
    assert store.rows()[0].state == "usable"


def test_a_mark_that_finds_no_room_leaves_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(store)
    before = sorted(store.path("one").iterdir())
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError):
        write_mark(store.path("one"), SnapshotError("snapshot.restore", "x"), {})
    assert sorted(store.path("one").iterdir()) == before


def test_prune_keeps_the_newest_usable(store: Store) -> None:
    for day in range(1, 6):
        make(store, f"day-{day}", f"2026-01-0{day}T00:00:00Z")
    write_mark(store.path("day-5"), SnapshotError("snapshot.restore", "x"), {})
    (store.path("day-4") / "manifest.json").unlink()
    with store.using("day-1"):
        assert sorted(store.prune(1)) == ["day-2", "day-4", "day-5"]
    assert store.names() == ["day-1", "day-3"]
    assert store.prune(0, prefix="day-3") == ["day-3"]
    make(store, "day-3", "2026-01-03T00:00:00Z")
    assert store.prune(0) == ["day-3", "day-1"]


def test_removal_while_in_use(store: Store) -> None:
    make(store)
    with store.using("one"), store.using("one"):
        assert refusal(lambda: store.remove("one")).code == "snapshot.busy"
    store.remove("one")
    assert [path.name for path in store.folder.iterdir()] == [".key"]


def test_two_prune_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    make(store, "one")
    make(store, "two")
    rows = store.rows()
    store.remove("one")
    monkeypatch.setattr(store, "rows", lambda: rows)
    assert store.prune(keep=0) == ["two"]


def test_what_goes_while_it_is_looked_at(store: Store) -> None:
    """Several threads look and use while others remove and sweep: all of it has a code."""
    stop, surprises, codes = threading.Event(), [], set()

    def repeat(act: Callable[[], object]) -> None:
        while not stop.is_set():
            try:
                act()
            except SnapshotError as error:
                codes.add(error.code)
            except Exception as error:
                surprises.append(error)

    def look() -> None:
        for name in store.names():
            store.verify(store.read(name), checksums=False)

    def use() -> None:
        for name in store.names():
            with store.using(name):
                pass

    acts = (look, use, store.sweep, lambda: store.prune(0), lambda: store.prune(0))
    threads = [threading.Thread(target=repeat, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for _ in range(15):
        with suppress(SnapshotError):
            make(store)
    stop.set()
    for thread in threads:
        thread.join()
    assert surprises == []
    assert codes <= {"snapshot.busy", "snapshot.absent", "snapshot.damaged"}


def test_a_read_only_volume(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    make(store)
    monkeypatch.setattr(Path, "rename", refuse)
    assert refusal(lambda: store.prune(0)).code == "snapshot.disk"
    assert store.names() == ["one"]


def test_a_link_is_no_artifact(store: Store, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (store.folder / "linked").symlink_to(tmp_path / "elsewhere")
    assert store.names() == [] and store.prune(0) == []
    assert (tmp_path / "elsewhere").exists()


# Flat weights


@pytest.fixture
def weights() -> Iterator[Weights]:
    fd = os.memfd_create("weights")
    os.pwrite(fd, os.urandom(2 << 20), 0)
    yield Weights("0123456789abcdef", b"{}", ((fd, 2 << 20),))
    os.close(fd)


def test_flat_weights_go_with_the_last_that_needs_them(store: Store, weights: Weights) -> None:
    make(store, "a", "2026-01-01T00:00:00Z", [weights])
    make(store, "b", "2026-01-02T00:00:00Z", [weights])
    make(store, "c", "2026-01-03T00:00:00Z")
    assert [row.weights for row in store.rows()] == ["none", "flat", "flat"]
    assert store.prune(2) == ["a"] and store.flat.holds(weights)
    store.remove("b")
    assert not store.flat.holds(weights)
    store.flat.write(weights)  # as a maker that was killed leaves it
    assert store.prune(1) == [] and not store.flat.holds(weights)


def test_flat_weights_of_what_is_being_made_stay(store: Store, weights: Weights) -> None:
    make(store, "old")
    with store.draft("one"):
        store.flat.write(weights)
        store.remove("old")
        assert store.prune(0) == [] and store.flat.holds(weights)
    assert not store.flat.holds(weights), "it was not made"


@pytest.mark.parametrize("damage", ["", "remove", "cut", "flip"])
def test_list_and_inspect_tell_of_flat_weights(store: Store, weights: Weights, damage: str) -> None:
    make(store, weights=[weights])
    place = store.flat.folder / weights.id
    if damage == "remove":
        place.unlink()
    elif damage == "cut":
        os.truncate(place, 1 << 20)
    elif damage == "flip":
        with place.open("r+b") as file:
            file.write(bytes(100))
    listed = json.loads(run(store, "list", "--json").output)[0]
    state = {"": "flat", "flip": "flat", "remove": "absent", "cut": "damaged"}[damage]
    assert (listed["weights"], listed["weights_bytes"]) == (state, 2 << 20)
    assert f"2 {state}" in run(store, "list").output
    for arguments in ([], ["--verify"]):
        shown = run(store, "inspect", "one", *arguments)
        if damage == "cut" or (damage == "flip" and arguments):
            assert shown.exception.code == "snapshot.weights-damaged"
        else:
            assert f"weights   {state}: 2.0 MiB in {weights.id}" in shown.output


# Checksums


def test_checksums_do_not_depend_on_threads(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for path, content in CONTENT.items():
        (tmp_path / path).write_bytes(content)
    seen: list[tuple[int, int]] = []
    one = checksum.compute_checksums(tmp_path, CONTENT, 1)
    four = checksum.compute_checksums(
        tmp_path, CONTENT, 4, lambda done, total: seen.append((done, total))
    )
    total = sum(len(content) for content in CONTENT.values())
    assert one == four and seen[-1] == (total, total) and len(seen) == 5
    assert len({digest for _, digest in one.values()}) == len(CONTENT)


def test_more_files_than_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"core-{number}.img" for number in range(400)]
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    opened, close, most = 0, os.close, 0

    def open_counted(*given: Any, **named: Any) -> int:
        nonlocal opened, most
        handle, opened = os_open(*given, **named), opened + 1
        most = max(most, opened)
        return handle

    def close_counted(handle: int) -> None:
        nonlocal opened
        close(handle)
        opened -= 1

    os_open = os.open
    monkeypatch.setattr(os, "open", open_counted)
    monkeypatch.setattr(os, "close", close_counted)
    seen: list[tuple[int, int]] = []
    found = checksum.compute_checksums(
        tmp_path, names, progress=lambda done, total: seen.append((done, total))
    )
    total = sum(map(len, names))
    assert list(found) == names and most <= 200
    assert seen[-1] == (total, total) and seen == sorted(seen)


def test_checksums_follow_no_link(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("/etc/hostname")
    with pytest.raises(OSError):
        checksum.compute_checksums(tmp_path, ["a"])


def test_pages_of_a_process() -> None:
    head = b"\0" * 8
    assert images.read_pages_id(head + b"\2\0\0\0" + b"\x08\x05") == 5
    assert images.read_pages_id(head + b"\3\0\0\0" + b"\x08\xac\x02") == 300
    assert images.read_pages_id(head + b"\0\0\0\0") == 0
    assert images.read_pages_id(b"") == 0


# The command


def run(store: Store, *arguments: str) -> Any:
    return CliRunner().invoke(cli.cli, ["--folder", str(store.folder), *arguments])


def test_the_commands_look_where_the_state_is(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(store)
    monkeypatch.setenv("WARMHOLD_STATE_DIR", str(store.folder.parent))
    assert "one" in CliRunner().invoke(cli.cli, ["list"]).output
    assert "kernel=k" in CliRunner().invoke(cli.cli, ["inspect", "one"]).output
    assert "removed one" in CliRunner().invoke(cli.cli, ["prune", "--keep", "0"]).output
    assert store.names() == []
    elsewhere = str(store.folder / "empty")
    assert "one" not in CliRunner().invoke(cli.cli, ["--folder", elsewhere, "list"]).output


def test_the_commands(store: Store) -> None:
    make(store)
    assert "one   usable" in run(store, "list").output
    assert json.loads(run(store, "list", "--json").output)[0]["name"] == "one"
    shown = run(store, "inspect", "one", "--verify")
    assert shown.exit_code == 0 and "every byte as written" in shown.output
    assert "3001 vllm" in shown.output and "in no flat file" in shown.output
    assert json.loads(run(store, "inspect", "one", "--json").output)["manifest"]["name"] == "one"
    assert run(store, "prune", "--keep", "0").output == "removed one\n"


def test_a_damaged_one_ends_with_1(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make(store)
    (store.path("one") / "shm.img").unlink()
    monkeypatch.setattr("sys.argv", ["snapshot", "--folder", str(store.folder), "inspect", "one"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith(
        "error: snapshot.damaged: one: shm.img is missing\nfix:"
    )


def test_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["snapshot", "prune"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2


def test_a_lock_ends_with_its_holder(store: Store) -> None:
    make(store)
    with store.using("one") as folder:
        handle = os.open(folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(handle)


def test_a_killed_makers_criu_still_holds_the_draft(store: Store) -> None:
    with store.draft("one") as draft:
        kept = os.dup(draft.lock_fd)  # as criu inherits it
        left = draft.folder.rename(draft.folder.with_name(".tmp-one-left"))
    assert store.sweep() == [] and left.exists()
    os.close(kept)
    assert store.sweep() == [".tmp-one-left"] and not left.exists()
