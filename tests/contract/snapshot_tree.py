# SPDX-License-Identifier: Apache-2.0
"""Snapshots of a small tree under the real criu, through the entrypoint's launcher.

    docker run ... --entrypoint python IMAGE /contract/snapshot_tree.py make|fresh STATE_FOLDER

`make` starts the tree, snapshots it live, kills and restores it five times, and tries what has to
fail; `fresh` restores the artifact that it left, in a container that has never seen the tree. One
line per check; ends with 1 if one fails. Rights: `snapshot check` lists them.
"""

import hashlib
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import warmhold_entrypoint
from small_tree import WEIGHT_BYTES
from warmhold_entrypoint import tree
from warmhold_snapshot import check, criu, identity, pids, shm
from warmhold_snapshot.artifact import Store
from warmhold_snapshot.create import Limits as CreateLimits
from warmhold_snapshot.create import create
from warmhold_snapshot.errors import SnapshotError
from warmhold_snapshot.folder import ALONE, locked
from warmhold_snapshot.restore import Limits, restore, wait_for_others
from warmhold_wcache import segments

HERE = Path(__file__).resolve().parent
LAUNCHER = Path(warmhold_entrypoint.__file__).with_name("launcher.py")
PORT = 8123
CONTROL, INSIDE, VAULT = "/tmp/tree-control.sock", "/tmp/tree-inside.sock", "/tmp/tree-vault.sock"
ABOVE = 3000
TIMES = 5
SMALL = Path("/small")  # a tmpfs of 40 MB
FAILED = []


def tell(name: str, ok: bool, detail: object = "") -> None:
    """One line per check."""
    print(f"{'ok  ' if ok else 'FAIL'} {name}{f': {detail}' if detail != '' else ''}", flush=True)
    if not ok:
        FAILED.append(name)


@contextmanager
def refused(name: str, code: str, word: str = ""):
    """A check that something is refused with that code."""
    try:
        yield
    except SnapshotError as error:
        tell(
            name, error.code == code and word in error.detail, f"{error.code}: {error.detail[:160]}"
        )
    else:
        tell(name, False, "it was not refused")


def serve_vault() -> None:
    """Hand out the weights: the same bytes in every container, in a sealed memfd."""
    fd = segments.create(WEIGHT_BYTES, "weights-0")
    os.pwrite(fd, hashlib.shake_128(b"weights").digest(WEIGHT_BYTES), 0)
    segments.seal(fd)
    with suppress(FileNotFoundError):
        Path(VAULT).unlink()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(VAULT)
    listener.listen()

    def hand_out() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                socket.send_fds(connection, [b"w"], [fd])

    threading.Thread(target=hand_out, daemon=True).start()


class Output:
    """The read end of a tree's stdout, with what came so far."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self.text = ""

    def close_writer(self) -> None:
        os.close(self.writer)

    def close(self) -> None:
        os.close(self.reader)

    def wait_for(self, word: str, timeout_s: float = 60) -> str:
        """Read until a whole line begins with the word; return the last such line."""
        deadline = time.monotonic() + timeout_s
        while True:
            lines = [line for line in self.text.split("\n")[:-1] if line.startswith(word)]
            if lines:
                return lines[-1]
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.reader], [], [], left)[0]:
                raise TimeoutError(f"no line begins with {word!r}: {self.text[-500:]}")
            chunk = os.read(self.reader, 65536)
            if not chunk:
                raise EOFError(self.text[-2000:])
            self.text = (self.text + chunk.decode())[-20000:]

    def next_beat(self) -> int:
        """Forget what came, return the number of the next beat."""
        self.text = ""
        while select.select([self.reader], [], [], 0)[0] and os.read(self.reader, 65536):
            pass
        self.text = "\n"
        return int(self.wait_for("beat").split()[1])


def control(order: str) -> dict:
    """One order over the control socket."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(30)
        client.connect(CONTROL)
        client.sendall(order.encode() + b"\n")
        answer = json.loads(client.makefile().readline())
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer


def ask_http() -> tuple[int, dict]:
    """One request as a client makes it."""
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=30)
    try:
        connection.request("GET", "/state")
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


class TreeEngine:
    """The tree as `create` speaks to an engine."""

    def hold(self) -> None:
        control("hold")

    def canary(self) -> object:
        return lasting(control("state"))

    def quiesce(self) -> None:
        control("quiesce")

    def resume(self) -> None:
        control("resume")


def lasting(state: dict) -> dict:
    """What of a state must be the same for ever; tokens only as their digests."""
    names = ("front", "core", "worker", "private", "ring", "loop", "flock", "weights")
    kept = {name: state[name] for name in (*names, "semaphore", "weights_at", "threads")}
    tokens = (state["front_token"] + state["worker_token"]).encode()
    return {**kept, "tokens": hashlib.sha256(tokens).hexdigest()}


class Storm:
    """Clients that connect anew all the time; each must see a whole answer or a 503."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self.statuses: dict[int, int] = {}
        self.broken: list[str] = []
        self.threads = [threading.Thread(target=self.run) for _ in range(4)]

    def run(self) -> None:
        while not self.stopping.is_set():
            try:
                status, _ = ask_http()
                self.statuses[status] = self.statuses.get(status, 0) + 1
            except Exception as error:
                self.broken.append(repr(error))

    def __enter__(self) -> "Storm":
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join()


def start_tree() -> tuple[int, Output]:
    """Start the tree as the runner starts an engine."""
    output = Output()
    words = [str(HERE / "small_tree.py"), str(PORT), CONTROL, INSIDE, VAULT]
    argv = [sys.executable, "-I", "-S", str(LAUNCHER), str(os.getuid()), str(tree.ENGINE_GROUP)]
    process = subprocess.Popen(
        [*argv, sys.executable, *words],
        stdin=subprocess.DEVNULL,
        stdout=output.writer,
        stderr=output.writer,
    )
    output.close_writer()
    output.wait_for("serving")
    return process.pid, output


def end_tree(root: int) -> None:
    """Kill every process of the tree, and reap."""
    left = tree.kill_members(None, 10)
    with suppress(ChildProcessError):
        os.waitpid(root, 0)
    tree.reap_adopted()
    assert left == [], left


def bring_back(store: Store, name: str, **options: object) -> tuple[int, int, Output, dict]:
    """Restore into a new pipe; return PID, pidfd, output and phases."""
    output = Output()
    try:
        restored = restore(store, name, output.writer, **options)
    except BaseException:
        output.close()
        raise
    finally:
        output.close_writer()
    return restored.pid, restored.pidfd, output, dict(restored.phases)


def rights_of(pid: int) -> dict[str, str]:
    """What the launcher took away, as the kernel tells it."""
    text = Path(f"/proc/{pid}/status").read_text()
    pairs = dict(line.split(":\t") for line in text.splitlines() if ":\t" in line)
    names = ("CapEff", "CapBnd", "NoNewPrivs", "Seccomp", "Groups")
    return {name: pairs[name].strip() for name in names}


def who_am_i(store: Store) -> dict[str, str]:
    """The identity that both containers have to agree on."""
    return identity.collect_identity(
        key=store.key,
        criu_version=criu.read_version(),
        versions={"build": Path("/opt/warmhold/build-id").read_text().strip()},
        argv=["small_tree.py", str(PORT)],
        environment={},
        secrets={"KEY": "sk-tree"},
        weights="weights-0",
    )


def address() -> str:
    return socket.gethostbyname(socket.gethostname())


def verify_back(label: str, canary: dict, beat: int, pid: int, output: Output) -> int:
    """A restored tree is the same one, serves, and its output goes on; return its last beat."""
    state = control("resume")
    tell(f"{label}: same tokens, memory, weights, addresses", lasting(state) == canary)
    status, over_http = ask_http()
    tell(f"{label}: answers over HTTP", status == 200 and lasting(over_http) == canary)
    now = output.next_beat()
    tell(f"{label}: output goes on in the new pipe", now > beat, f"{beat} -> {now}")
    first, second = state["counters"], control("state")["counters"]
    deadline = time.monotonic() + 10
    while (
        not all(b > a for a, b in zip(first, second, strict=True)) and time.monotonic() < deadline
    ):
        second = control("state")["counters"]
    tell(f"{label}: its threads run", all(b > a for a, b in zip(first, second, strict=True)))
    process = pids.read_process(pid)
    tell(f"{label}: child of the caller", process is not None and process.parent == os.getpid())
    return now


def make(state: Path) -> None:
    store = Store(state / "snapshots")
    points = check.conclude(check.read_found(store.folder), 1 << 30, False, ABOVE)
    tell("check", all(point.ok for point in points), [p.detail for p in points if not p.ok] or "")
    began = time.monotonic()
    pids.raise_cursor(ABOVE)
    tell("cursor raised", pids.read_cursor() >= ABOVE, f"{time.monotonic() - began:.2f} s")
    serve_vault()
    root, output = start_tree()
    tell("high PIDs", root > ABOVE, root)
    before = lasting(ask_http()[1])
    rights = rights_of(root)
    tell("no rights", rights["CapEff"] == "0" * 16 and rights["Seccomp"] == "2", rights)
    engine, who = TreeEngine(), who_am_i(store)

    crowded = Store(SMALL / "snapshots")
    with refused("too little room", "snapshot.rights", "disk"):
        create(root, engine, crowded, "one", who)
    check.estimate_bytes, estimate = lambda *_: 0, check.estimate_bytes
    with refused("the disk is full during the dump", "snapshot.dump"):
        create(root, engine, crowded, "one", who)
    check.estimate_bytes = estimate
    tell("no script is left", not list(Path("/tmp").glob(".post-dump*")))
    tell("nothing half made is left", crowded.names() == [] and crowded.sweep() == [])
    tell("it serves", lasting(ask_http()[1]) == before)
    maker = subprocess.Popen(
        [sys.executable, __file__, "create", str(SMALL.parent / "cut"), str(root)]
    )
    cut = Store(SMALL.parent / "cut")
    wait_for_log(cut.folder)
    maker.kill()
    maker.wait()
    wait_for_criu()
    tell("a killed maker leaves nothing in a list", cut.rows() == [])
    control("resume")
    tell("and the engine goes on", lasting(ask_http()[1]) == before)
    tell(
        "what it left is swept",
        len(cut.sweep()) == 1 and list(cut.folder.iterdir()) == [cut.folder / ".key"],
    )

    with socket.create_connection(("127.0.0.1", PORT)) as idle:
        idle.sendall(b"G")
        with refused("an idle connection is in the way", "snapshot.engine", "connection"):
            create(root, engine, store, "one", who, limits=CreateLimits(settle_s=1))
    tell("it goes on", lasting(ask_http()[1]) == before and store.names() == [])

    beat = output.next_beat()
    notes = {"address": address(), "host": socket.gethostname()}
    with Storm() as storm:
        report = create(root, engine, store, "one", who, notes=notes)
    tell("created", True, f"pause {report.pause_s:.2f} s, frozen {report.frozen_s:.2f} s")
    tell("bytes", report.image_bytes > 100 << 20, f"{report.image_bytes / 2**20:.1f} MiB")
    print(f"     by kind {dict(list(report.bytes_by_kind.items())[:6])}", flush=True)
    print(f"     by process {dict(report.bytes_by_process)}", flush=True)
    print(f"     seconds { {k: round(v, 3) for k, v in report.timings.items()} }", flush=True)
    print(f"     notes {list(report.notes)}", flush=True)
    tell("no client was cut", not storm.broken, storm.broken[:3] or storm.statuses)
    tell("goes on serving", lasting(ask_http()[1]) == before)
    tell("output goes on", output.next_beat() > beat)
    manifest = store.read("one")
    canary = manifest.canary
    tell("canary", canary == before)
    names = [file.name for file in manifest.shm]
    tell("shm saved", any(n.startswith("link_remap.") for n in names), names)
    link_remaps = list(shm.FOLDER.glob("link_remap.*"))
    tell("no link-remap is left behind", link_remaps == [], link_remaps)

    with refused("restore beside the running tree", "snapshot.pids-taken"):
        bring_back(store, "one", identity=who, limits=Limits(free_s=0.1))
    tell("the running tree is unharmed", lasting(ask_http()[1]) == before)
    end_tree(root)
    output.close()

    other = {**who, "weights": "weights-1"}
    with refused("another identity", "snapshot.identity-mismatch", "weights"):
        bring_back(store, "one", identity=other)
    with socket.create_server(("0.0.0.0", PORT)), refused("port taken", "snapshot.port-taken"):
        bring_back(store, "one", identity=who)
    pages = max((store.path("one") / "images").glob("pages-*.img"), key=lambda p: p.stat().st_size)
    flip(pages)
    with refused("a flipped bit", "snapshot.damaged", pages.name):
        bring_back(store, "one", identity=who)
    flip(pages)
    for path in shm.FOLDER.iterdir():
        path.unlink()
    with refused("criu outlasts its limit", "snapshot.timeout"):
        bring_back(store, "one", identity=who, limits=Limits(criu_s=0.02))
    left = pids.find_taken(manifest.ids())
    tell("nothing of it is left", not left and not list(shm.FOLDER.iterdir()), left)
    spoiled = store.path("one") / "images" / "inventory.img"
    content = spoiled.read_bytes()
    spoiled.write_bytes(bytes(len(content)))
    with refused("criu fails", "snapshot.restore"):
        bring_back(store, "one", identity=who, checksums=False)
    spoiled.write_bytes(content)
    (store.path("one") / criu.RESTORE_LOG).unlink()
    left = pids.find_taken(manifest.ids())
    tell("nothing of that is left", not left and not list(shm.FOLDER.iterdir()), left)

    began = time.monotonic()
    restorer = subprocess.Popen([sys.executable, __file__, "restore", str(state)])
    while not (store.path("one") / criu.RESTORE_LOG).exists():
        assert time.monotonic() < began + 60, "no restore began"
    restorer.kill()
    restorer.wait()
    tell("a killed restorer's criu ends", wait_for_others(60))
    end_tree(root)
    left = pids.wait_until_free(manifest.ids(), 5)
    tell("and what it made can be ended", not left, left)

    open_before = len(list(Path("/proc/self/fd").iterdir()))
    all_phases = []
    for time_number in range(TIMES):
        label = f"restore {time_number + 1}"
        began = time.monotonic()
        pid, pidfd, output, phases = bring_back(store, "one", identity=who)
        tell(label, pid == root, f"{time.monotonic() - began:.2f} s {rounded(phases)}")
        all_phases.append(phases)
        verify_back(label, canary, beat, pid, output)
        tell(f"{label}: still no rights", rights_of(pid) == rights)
        with locked(shm.FOLDER, ALONE):
            tell(f"{label}: the tree does not hold the lock", True)
        if time_number == TIMES - 3:
            beat = output.next_beat()
            report = create(pid, engine, store, "one", who, notes=notes)
            manifest = store.read("one")
            tell("a restored tree makes a snapshot too", manifest.canary == canary, report.pause_s)
        if time_number == TIMES - 1:
            with suppress(Exception):
                control("exit")
            select.select([pidfd], [], [], 10)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            tell(f"{label}: its exit code arrives", status == 7, status)
        end_tree(pid)
        os.close(pidfd)
        output.close()
    tell("no descriptor leaks", len(list(Path("/proc/self/fd").iterdir())) == open_before)
    left = pids.wait_until_free(manifest.ids(), 5)
    below = [process.pid for process in pids.read_tree(os.getpid())]
    tell("no process is left", not left and below == [os.getpid()], left)
    now = sorted(path.name for path in shm.FOLDER.iterdir())
    # Python's resource tracker may have removed the ring before it was killed itself.
    expected = {name for name in names if not name.startswith("link_remap.")}
    tell("/dev/shm as one engine leaves it", set(now) <= expected, now)
    tell("listed", [row.state for row in store.rows()] == ["usable"])


def wait_for_log(folder: Path) -> None:
    """Until criu has begun."""
    deadline = time.monotonic() + 60
    while not list(folder.glob(".tmp-*/dump.log")):
        assert time.monotonic() < deadline, "no dump began"


def wait_for_criu() -> None:
    """Until criu has let the tree go."""
    deadline = time.monotonic() + 60
    while any(process.name == "criu" for process in pids.read_all()):
        tree.reap_adopted()
        assert time.monotonic() < deadline, "criu does not end"


def create_only(folder: Path) -> None:
    """A maker that will be killed."""
    store = Store(folder)
    create(int(sys.argv[3]), TreeEngine(), store, "one", who_am_i(store))


def restore_only(state: Path) -> None:
    """A restorer that will be killed."""
    store = Store(state / "snapshots")
    bring_back(store, "one", identity=who_am_i(store))
    signal.pause()


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def rounded(phases: dict) -> dict:
    return {name: round(seconds, 3) for name, seconds in phases.items()}


def fresh(state: Path) -> None:
    store = Store(state / "snapshots")
    serve_vault()
    sleepers = [subprocess.Popen(["sleep", "600"]) for _ in range(200)]
    manifest = store.read("one")
    other = (address(), socket.gethostname())
    tell("another address", other[0] != manifest.notes["address"], other)
    tell("another host name", other[1] != manifest.notes["host"])
    tell("nothing in /dev/shm", not list(shm.FOLDER.iterdir()))
    began = time.monotonic()
    pid, pidfd, output, phases = bring_back(store, "one", identity=who_am_i(store))
    tell(
        "restored", pid == manifest.root_pid, f"{time.monotonic() - began:.2f} s {rounded(phases)}"
    )
    verify_back("fresh", manifest.canary, 0, pid, output)
    end_tree(pid)
    os.close(pidfd)
    output.close()
    for sleeper in sleepers:
        sleeper.send_signal(signal.SIGKILL)
        sleeper.wait()


def main() -> int:
    tree.become_subreaper()
    {"make": make, "fresh": fresh, "create": create_only, "restore": restore_only}[sys.argv[1]](
        Path(sys.argv[2])
    )
    print(f"{len(FAILED)} failed: {FAILED}" if FAILED else "all passed", flush=True)
    return 1 if FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
