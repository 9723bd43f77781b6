# SPDX-License-Identifier: Apache-2.0
"""A small tree as the runner has an engine: started, asked, snapshotted, restored and ended.

For the checks beside it, within one container.
"""

import hashlib
import http.client
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import warmhold_entrypoint
from small_tree import WEIGHT_BYTES
from warmhold_entrypoint.running import tree
from warmhold_snapshot import criu, identity, pids
from warmhold_snapshot.artifact import Store
from warmhold_snapshot.errors import SnapshotError
from warmhold_snapshot.restore import restore
from warmhold_wcache import segments

HERE = Path(__file__).resolve().parent
LAUNCHER = Path(warmhold_entrypoint.__file__).with_name("launcher.py")
PORT = 8123
CONTROL, INSIDE, VAULT = "/tmp/tree-control.sock", "/tmp/tree-inside.sock", "/tmp/tree-vault.sock"
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


def read_shared_kib() -> int:
    """KiB of its memory that the worker shares with its parents, since they were forked."""
    text = Path(f"/proc/{control('state')['worker']}/smaps_rollup").read_text()
    return int(text.partition("Shared_Dirty:")[2].split()[0])


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
    names = ("front", "core", "worker", "private", "ring", "loop", "flock", "weights", "pages")
    kept = {name: state[name] for name in (*names, "shared", "semaphore", "weights_at", "threads")}
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
        files={},
        packages=[],
        secrets={"KEY": "sk-tree"},
        served=[],
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


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def rounded(phases: dict) -> dict:
    return {name: round(seconds, 3) for name, seconds in phases.items()}
