# SPDX-License-Identifier: Apache-2.0
"""What is in the way of a dump: from canned /proc texts, and of a real process."""

import json
import mmap
import os
import socket
import stat
import subprocess
import sys
from ipaddress import ip_address
from pathlib import Path

import pytest
from warmhold_snapshot import fds
from warmhold_snapshot.errors import SnapshotError
from warmhold_snapshot.fds import Descriptor, FileStatus, Held, Mapping
from warmhold_snapshot.pids import Process
from warmhold_snapshot.rules import Offender
from warmhold_snapshot.scan import Scan, judge, scan
from warmhold_snapshot.sockets import ESTABLISHED, LISTEN, InetSocket, Sockets, UnixSocket

LIMIT = 1 << 20
NO_SOCKETS = Sockets()
REGULAR = FileStatus(4096, 1, stat.S_IFREG | 0o600, 1, 5)
LOOPBACK, OWN, WILDCARD = ip_address("127.0.0.1"), ip_address("172.17.0.2"), ip_address("0.0.0.0")


def process(pid: int, parent: int = 1) -> Process:
    return Process(pid, parent, pid, pid, "engine", 1, (pid,))


def judge_one(
    *items: Descriptor,
    mappings: tuple[Mapping, ...] = (),
    sockets: Sockets = NO_SOCKETS,
    pipes: dict[int, int] | None = None,
) -> Scan:
    held = [Held(10, items, mappings)]
    return judge([process(10), process(11, 10)], held, sockets, pipes or {}, LIMIT)


def kinds(found: Scan) -> list[str]:
    return [offender.kind for offender in found.offenders]


def tcp(inode: int, local: tuple, remote: tuple, state: int = ESTABLISHED, kind: str = "tcp"):
    return {inode: InetSocket(inode, kind, local, remote, state)}


@pytest.mark.parametrize(
    ("link", "kind"),
    [
        ("anon_inode:[io_uring]", "io_uring"),
        ("anon_inode:inotify", "inotify"),
        ("anon_inode:[fanotify]", "fanotify"),
        ("anon_inode:[userfaultfd]", "userfaultfd"),
        ("anon_inode:[perf_event]", "perf_event"),
        ("anon_inode:bpf-prog", "bpf"),
        ("/memfd:weights-3 (deleted)", "memfd"),
        ("/memfd:warmhold:7 (deleted)", "memfd"),
        ("/dmabuf:x", "dmabuf"),
        ("/SYSV00000000 (deleted)", "sysv-shm"),
    ],
)
def test_offending_links(link: str, kind: str) -> None:
    found = judge_one(Descriptor(3, link))
    assert kinds(found) == [kind]
    assert found.offenders[0].pid == 10 and found.offenders[0].fd == 3


@pytest.mark.parametrize(
    "link",
    [
        *("anon_inode:[eventpoll]", "anon_inode:[eventfd]", "anon_inode:[timerfd]"),
        *("/memfd:triton (deleted)", "/dev/null", "/dev/zero (deleted)", "net:[4026531840]"),
    ],
)
def test_harmless_links(link: str) -> None:
    assert kinds(judge_one(Descriptor(3, link))) == []


def test_a_name_that_no_manifest_can_hold() -> None:
    found = judge_one(
        Descriptor(3, "/models/caf\udce9.bin", status=REGULAR),
        Descriptor(4, "/models/café.bin", status=REGULAR),
        mappings=(Mapping("1-2", "/models/caf\ufffd.bin", 9, REGULAR),),
    )
    assert kinds(found) == ["file-name", "file-name"]
    assert "caf\\udce9.bin" in found.offenders[0].line().encode().decode()


def test_mapped_weights_are_in_the_way_too() -> None:
    found = judge_one(mappings=(Mapping("1-2", "/memfd:weights-0 (deleted)", 9, REGULAR),))
    assert kinds(found) == ["memfd"]
    assert found.offenders[0].line().startswith("pid 10 mapped: memfd")


@pytest.mark.parametrize(
    ("link", "links", "size", "expected"),
    [
        (
            "/dev/shm/abc (deleted)",
            1,
            32,
            [],
        ),  # a semaphore: CRIU's link-remap, saved with the rest
        ("/dev/shm/abc (deleted)", 0, LIMIT, []),
        ("/tmp/gone (deleted)", 0, LIMIT, []),
        ("/tmp/gone (deleted)", 0, LIMIT + 1, ["deleted-file"]),
        ("/tmp/gone (deleted)", 1, 32, ["deleted-file"]),
    ],
)
def test_deleted_files(link: str, links: int, size: int, expected: list[str]) -> None:
    status = FileStatus(size, links, stat.S_IFREG | 0o600, 1, 5)
    assert kinds(judge_one(Descriptor(3, link, status=status))) == expected
    assert kinds(judge_one(mappings=(Mapping("1-2", link, 5, status),))) == expected


@pytest.mark.parametrize(
    ("link", "expected"),
    [("/dev/null", []), ("/dev/pts/3", ["terminal"]), ("/dev/kvm", ["device"])],
)
def test_devices(link: str, expected: list[str]) -> None:
    status = FileStatus(0, 1, stat.S_IFCHR | 0o600, 1, 5)
    assert kinds(judge_one(Descriptor(3, link, status=status))) == expected


def test_pidfds() -> None:
    inside = Descriptor(3, "anon_inode:[pidfd]", "flags: 02\nPid:\t11\n")
    outside = Descriptor(4, "anon_inode:[pidfd]", "flags: 02\nPid:\t999\n")
    assert kinds(judge_one(inside)) == []
    assert kinds(judge_one(outside)) == ["pidfd"]


def test_pipes() -> None:
    stdout, stderr = Descriptor(1, "pipe:[70]"), Descriptor(2, "pipe:[70]")
    found = judge_one(stdout, stderr, Descriptor(5, "pipe:[71]"), pipes={70: 1})
    assert kinds(found) == [] and found.stdio == (70,)
    found = judge_one(stdout, stderr, Descriptor(5, "pipe:[71]"), pipes={70: 1, 71: 1})
    assert kinds(found) == ["pipe-peer"]


def test_stdout_and_stderr_may_be_two_pipes() -> None:
    assert judge_one(Descriptor(2, "pipe:[71]"), Descriptor(1, "pipe:[70]")).stdio == (70, 71)


def test_unix_sockets() -> None:
    pair = {1: UnixSocket(1, 2, "", 0), 2: UnixSocket(2, 1, "", 0)}
    ends = (Descriptor(3, "socket:[1]"), Descriptor(4, "socket:[2]"))
    assert kinds(judge_one(*ends, sockets=Sockets(unix=pair))) == []
    found = judge_one(ends[0], sockets=Sockets(unix={**pair, 2: UnixSocket(2, 1, "/run/v", 0)}))
    assert kinds(found) == ["unix-peer"] and "/run/v" in found.offenders[0].detail
    waiting = Sockets(unix={1: UnixSocket(1, 0, "/run/c", 2)})
    assert kinds(judge_one(ends[0], sockets=waiting)) == ["unix-pending"]


def test_tcp_within_the_tree() -> None:
    here, there = (LOOPBACK, 5000), (LOOPBACK, 6000)
    both = Sockets(inet={**tcp(1, here, there), **tcp(2, there, here)})
    assert (
        kinds(judge_one(Descriptor(3, "socket:[1]"), Descriptor(4, "socket:[2]"), sockets=both))
        == []
    )
    assert kinds(judge_one(Descriptor(3, "socket:[1]"), sockets=both)) == ["tcp-peer"]


def test_an_offender_in_another_process_is_seen() -> None:
    held = [Held(10, (), ()), Held(11, (Descriptor(7, "anon_inode:[io_uring]"),), ())]
    found = judge([process(10), process(11, 10)], held, Sockets(), {}, LIMIT)
    assert [(offender.pid, offender.fd) for offender in found.offenders] == [(11, 7)]


@pytest.mark.parametrize(
    ("address", "expected"),
    [(WILDCARD, []), (LOOPBACK, []), (ip_address("::"), []), (OWN, ["own-address"])],
)
def test_listeners(address: object, expected: list[str]) -> None:
    table = Sockets(inet=tcp(1, (address, 8000), (WILDCARD, 0), LISTEN))
    found = judge_one(Descriptor(3, "socket:[1]"), sockets=table)
    assert kinds(found) == expected and found.listeners == ((str(address), 8000),)


def test_udp() -> None:
    item = Descriptor(3, "socket:[1]")
    for local, remote, expected in (
        ((WILDCARD, 53), (WILDCARD, 0), []),
        ((OWN, 53), (WILDCARD, 0), ["own-address"]),
        ((OWN, 53), (ip_address("8.8.8.8"), 53), ["udp-peer", "own-address"]),
    ):
        assert (
            kinds(judge_one(item, sockets=Sockets(inet=tcp(1, local, remote, 7, "udp"))))
            == expected
        )


def test_all_offenders_are_listed_at_once() -> None:
    found = judge_one(
        Descriptor(3, "anon_inode:[io_uring]"),
        Descriptor(4, "anon_inode:inotify"),
        Descriptor(5, "/memfd:weights (deleted)"),
    )
    with pytest.raises(SnapshotError) as caught:
        found.require_clean("now")
    assert caught.value.code == "snapshot.fds" and len(caught.value.lines) == 3
    Scan().require_clean("now")


def test_of_thousands_of_offenders_some_are_told() -> None:
    """All of them would be more than the runner's answer may have."""
    found = Scan(tuple(Offender(42, fd, "device", f"/{'x' * 4000}") for fd in range(3000)))
    with pytest.raises(SnapshotError) as caught:
        found.require_clean("now")
    assert caught.value.detail.startswith("3000 thing(s) cannot be taken along now: pid 42 fd 0:")
    assert caught.value.lines[-1] == "and 2900 more"
    assert len(json.dumps(caught.value.to_json())) < 100_000


def test_files_that_a_restore_needs() -> None:
    found = judge_one(
        Descriptor(3, "/state/log", "pos: 0\nflags:\t02102001\n", REGULAR),
        Descriptor(4, "/state/read", "pos: 0\nflags:\t0100000\n", REGULAR),
        Descriptor(5, "/dev/shm/psm_1", "flags:\t02\n", REGULAR),
        Descriptor(6, "/gone (deleted)", "flags:\t02\n", REGULAR),
        mappings=(Mapping("1-2", "/lib/libc.so", 3, REGULAR),),
    )
    assert [file.path for file in found.files] == ["/lib/libc.so", "/state/log", "/state/read"]
    assert found.notes == ("pid 10 fd 3: /state/log is open for writing",)
    assert found.shm_inodes == {5}


def make_proc(proc: Path, pid: int, links: dict[int, str], maps: str = "") -> None:
    (proc / str(pid) / "fd").mkdir(parents=True)
    (proc / str(pid) / "fdinfo").mkdir()
    for fd, link in links.items():
        (proc / str(pid) / "fd" / str(fd)).symlink_to(link)
        (proc / str(pid) / "fdinfo" / str(fd)).write_text("pos:\t0\nflags:\t02\n")
    (proc / str(pid) / "maps").write_text(maps)


def test_reading_a_canned_proc(tmp_path: Path) -> None:
    maps = (
        "7f00-7f10 r--p 00000000 fd:00 77 /usr/lib/a b.so\n"
        "7f10-7f20 r-xp 00001000 fd:00 77 /usr/lib/a b.so\n"
        "7f20-7f30 rw-s 00000000 00:01 88 /memfd:weights-1 (deleted)\n"
        "7f30-7f40 rw-p 00000000 00:00 0 [heap]\n7f40-7f50 rw-p 00000000 00:00 0\n"
    )
    make_proc(tmp_path, 10, {1: "pipe:[70]", 12: "anon_inode:[eventpoll]"}, maps)
    make_proc(tmp_path, 20, {0: "pipe:[70]"})
    held = fds.read_held(10, tmp_path)
    assert [(item.fd, item.link) for item in held.descriptors] == [
        (1, "pipe:[70]"),
        (12, "anon_inode:[eventpoll]"),
    ]
    assert [(item.address, item.link) for item in held.mappings] == [
        ("7f00-7f10", "/usr/lib/a b.so"),
        ("7f20-7f30", "/memfd:weights-1 (deleted)"),
    ]
    assert fds.find_pipe_holders([70, 71], [10], tmp_path) == {70: 20}
    assert fds.find_pipe_holders([70], [10, 20], tmp_path) == {}
    assert fds.read_held(99, tmp_path) == Held(99, (), ())


BODY = """
import os, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
fd = os.memfd_create("weights-1")
ring = os.memfd_create("other")
print(listener.getsockname()[1], flush=True)
accepted = listener.accept()
print("accepted", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("own_session", [True, False])
def test_a_real_process(own_session: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BODY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=own_session,
    ) as child:
        assert child.stdin and child.stdout
        port = int(child.stdout.readline())
        with socket.create_connection(("127.0.0.1", port)):
            child.stdout.readline()
            found = scan(child.pid)
        child.stdin.close()
    expected = ["memfd", "pipe-peer", "tcp-peer"]
    assert sorted(set(kinds(found)) - {"session"}) == expected
    assert ("session" in kinds(found)) is not own_session
    assert found.listeners == (("127.0.0.1", port),)
    assert len(found.stdio) == 1


def test_a_file_in_shm_is_found_by_its_inode() -> None:
    path = Path("/dev/shm", f"warmhold-test-{os.getpid()}")
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        inode = path.stat().st_ino
        path.unlink()
        assert inode in fds.shm_inodes([fds.read_held(os.getpid())])
