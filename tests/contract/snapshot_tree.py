# SPDX-License-Identifier: Apache-2.0
"""Snapshots of a small tree under the real criu, through the entrypoint's launcher.

    docker run ... --entrypoint python IMAGE /contract/snapshot_tree.py make|fresh STATE_FOLDER

`make` starts the tree, snapshots it live, kills and restores it five times, and tries what has to
fail; `fresh` restores the artifact that it left, in a container that has never seen the tree. One
line per check; ends with 1 if one fails. Rights: `snapshot check` lists them.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from tree_stand import (
    FAILED,
    PORT,
    Storm,
    TreeEngine,
    address,
    ask_http,
    bring_back,
    control,
    end_tree,
    flip,
    lasting,
    read_shared_kib,
    refused,
    rights_of,
    rounded,
    serve_vault,
    start_tree,
    tell,
    verify_back,
    wait_for_criu,
    wait_for_log,
    who_am_i,
)
from warmhold_entrypoint.running import tree
from warmhold_snapshot import check, criu, pids, shm
from warmhold_snapshot.artifact import Store
from warmhold_snapshot.create import Limits as CreateLimits
from warmhold_snapshot.create import create
from warmhold_snapshot.folder import ALONE, locked
from warmhold_snapshot.restore import Limits, wait_for_others

ABOVE = 3000
TIMES = 5
SMALL = Path("/small")  # a tmpfs of 40 MB
CUT = Path("/cut")


class Course:
    """One tree, from its start to its last restore; the parts build on each other."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.store = Store(self.state / "snapshots")
        points = check.conclude(check.read_found(self.store.folder), 1 << 30, False, ABOVE)
        tell(
            "check", all(point.ok for point in points), [p.detail for p in points if not p.ok] or ""
        )
        began = time.monotonic()
        pids.raise_cursor(ABOVE)
        tell("cursor raised", pids.read_cursor() >= ABOVE, f"{time.monotonic() - began:.2f} s")
        serve_vault()
        self.root, self.output = start_tree()
        tell("high PIDs", self.root > ABOVE, self.root)
        self.before = lasting(ask_http()[1])
        self.rights = rights_of(self.root)
        tell(
            "no rights",
            self.rights["CapEff"] == "0" * 16 and self.rights["Seccomp"] == "2",
            self.rights,
        )
        self.engine, self.who = TreeEngine(), who_am_i(self.store)

    def try_makers_that_fail(self) -> None:
        """The engine goes on each time, and no artifact is seen."""
        crowded = Store(SMALL / "snapshots")
        with refused("too little room", "snapshot.disk", "disk"):
            create(self.root, self.engine, crowded, "one", self.who)
        estimate, spare = check.estimate_bytes, check._SPARE_BYTES
        check.estimate_bytes, check._SPARE_BYTES = lambda *_: 0, 0
        with refused("the disk is full during the dump", "snapshot.dump"):
            create(self.root, self.engine, crowded, "one", self.who)
        check.estimate_bytes, check._SPARE_BYTES = estimate, spare
        tell("no script is left", not list(Path("/tmp").glob(".post-dump*")))
        tell("nothing half made is left", crowded.names() == [] and crowded.sweep() == [])
        tell("it serves", lasting(ask_http()[1]) == self.before)
        maker = subprocess.Popen([sys.executable, __file__, "create", str(CUT), str(self.root)])
        cut = Store(CUT)
        wait_for_log(cut.folder)
        maker.kill()
        maker.wait()
        wait_for_criu()
        tell("a killed maker leaves nothing in a list", cut.rows() == [])
        control("resume")
        tell("and the engine goes on", lasting(ask_http()[1]) == self.before)
        tell(
            "what it left is swept",
            len(cut.sweep()) == 1 and list(cut.folder.iterdir()) == [cut.folder / ".key"],
        )

        with socket.create_connection(("127.0.0.1", PORT)) as idle:
            idle.sendall(b"G")
            with refused("an idle connection is in the way", "snapshot.engine", "connection"):
                create(
                    self.root,
                    self.engine,
                    self.store,
                    "one",
                    self.who,
                    limits=CreateLimits(settle_s=1),
                )
        tell("it goes on", lasting(ask_http()[1]) == self.before and self.store.names() == [])

    def snapshot_while_serving(self) -> None:
        """With clients that never stop."""
        self.beat, shared_kib = self.output.next_beat(), read_shared_kib()
        self.notes = {"address": address(), "host": socket.gethostname()}
        with Storm() as storm:
            report = create(self.root, self.engine, self.store, "one", self.who, notes=self.notes)
        tell("created", True, f"pause {report.pause_s:.2f} s, frozen {report.frozen_s:.2f} s")
        tell("bytes", report.image_bytes > 100 << 20, f"{report.image_bytes / 2**20:.1f} MiB")
        print(f"     by kind {dict(list(report.bytes_by_kind.items())[:6])}", flush=True)
        print(f"     by process {dict(report.bytes_by_process)}", flush=True)
        print(f"     seconds { {k: round(v, 3) for k, v in report.timings.items()} }", flush=True)
        print(f"     notes {list(report.notes)}", flush=True)
        tell("no client was cut", not storm.broken, storm.broken[:3] or storm.statuses)
        tell("goes on serving", lasting(ask_http()[1]) == self.before)
        tell("output goes on", self.output.next_beat() > self.beat)
        still_kib = read_shared_kib()
        tell(
            "shared memory stays shared",
            still_kib > shared_kib / 2,
            f"{shared_kib}, {still_kib} KiB",
        )
        self.manifest = self.store.read("one")
        tell("canary", self.manifest.canary == self.before)
        names = [file.name for file in self.manifest.shm]
        tell("shm saved", any(n.startswith("link_remap.") for n in names), names)
        link_remaps = list(shm.FOLDER.glob("link_remap.*"))
        tell("no link-remap is left behind", link_remaps == [], link_remaps)

    def try_restores_that_fail(self) -> None:
        """Each for its own reason, and nothing is left."""
        with refused("restore beside the running tree", "snapshot.pids-taken"):
            bring_back(self.store, "one", identity=self.who, limits=Limits(free_s=0.1))
        tell("the running tree is unharmed", lasting(ask_http()[1]) == self.before)
        end_tree(self.root)
        self.output.close()

        other = {**self.who, "weights": "weights-1"}
        with refused("another identity", "snapshot.identity-mismatch", "weights"):
            bring_back(self.store, "one", identity=other)
        with socket.create_server(("0.0.0.0", PORT)), refused("port taken", "snapshot.port-taken"):
            bring_back(self.store, "one", identity=self.who)
        pages = max(
            (self.store.path("one") / "images").glob("pages-*.img"), key=lambda p: p.stat().st_size
        )
        flip(pages)
        with refused("a flipped bit", "snapshot.damaged", pages.name):
            bring_back(self.store, "one", identity=self.who)
        flip(pages)
        for path in shm.FOLDER.iterdir():
            path.unlink()
        with refused("criu outlasts its limit", "snapshot.timeout"):
            bring_back(
                self.store, "one", identity=self.who, limits=Limits(criu_s=0.02), checksums=False
            )
        left = pids.find_taken(self.manifest.ids())
        tell("nothing of it is left", not left and not list(shm.FOLDER.iterdir()), left)
        spoiled = self.store.path("one") / "images" / "inventory.img"
        content = spoiled.read_bytes()
        spoiled.write_bytes(bytes(len(content)))
        with refused("criu fails", "snapshot.restore"):
            bring_back(self.store, "one", identity=self.who, checksums=False)
        spoiled.write_bytes(content)
        (self.store.path("one") / criu.RESTORE_LOG).unlink()
        left = pids.find_taken(self.manifest.ids())
        tell("nothing of that is left", not left and not list(shm.FOLDER.iterdir()), left)

        began = time.monotonic()
        restorer = subprocess.Popen([sys.executable, __file__, "restore", str(self.state)])
        while not (self.store.path("one") / criu.RESTORE_LOG).exists():
            assert time.monotonic() < began + 60, "no restore began"
        restorer.kill()
        restorer.wait()
        tell("a killed restorer's criu ends", wait_for_others(60))
        end_tree(self.root)
        left = pids.wait_until_free(self.manifest.ids(), 5)
        tell("and what it made can be ended", not left, left)

    def restore_often(self) -> None:
        """Killed and restored, once from a snapshot of a restored tree."""
        open_before = len(list(Path("/proc/self/fd").iterdir()))
        for time_number in range(TIMES):
            label = f"restore {time_number + 1}"
            began = time.monotonic()
            pid, pidfd, self.output, phases = bring_back(self.store, "one", identity=self.who)
            tell(label, pid == self.root, f"{time.monotonic() - began:.2f} s {rounded(phases)}")
            verify_back(label, self.before, self.beat, pid, self.output)
            tell(f"{label}: still no rights", rights_of(pid) == self.rights)
            with locked(shm.FOLDER, ALONE, "held by the tree"):
                tell(f"{label}: the tree does not hold the lock", True)
            if time_number == TIMES - 3:
                self.beat = self.output.next_beat()
                report = create(pid, self.engine, self.store, "one", self.who, notes=self.notes)
                self.manifest = self.store.read("one")
                tell(
                    "a restored tree makes a snapshot too",
                    self.manifest.canary == self.before,
                    report.pause_s,
                )
            if time_number == TIMES - 1:
                with suppress(Exception):
                    control("exit")
                select.select([pidfd], [], [], 10)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                tell(f"{label}: its exit code arrives", status == 7, status)
            end_tree(pid)
            os.close(pidfd)
            self.output.close()
        tell("no descriptor leaks", len(list(Path("/proc/self/fd").iterdir())) == open_before)
        left = pids.wait_until_free(self.manifest.ids(), 5)
        below = [process.pid for process in pids.read_tree(os.getpid())]
        tell("no process is left", not left and below == [os.getpid()], left)
        now = sorted(path.name for path in shm.FOLDER.iterdir())
        # Python's resource tracker may have removed the ring self.before it was killed itself.
        expected = {file.name for file in self.manifest.shm}
        expected = {name for name in expected if not name.startswith("link_remap.")}
        tell("/dev/shm as one engine leaves it", set(now) <= expected, now)
        tell("listed", [row.state for row in self.store.rows()] == ["usable"])


def make(state: Path) -> None:
    course = Course(state)
    course.try_makers_that_fail()
    course.snapshot_while_serving()
    course.try_restores_that_fail()
    course.restore_often()


def create_only(folder: Path) -> None:
    """A maker that will be killed."""
    store = Store(folder)
    create(int(sys.argv[3]), TreeEngine(), store, "one", who_am_i(store))


def restore_only(state: Path) -> None:
    """A restorer that will be killed."""
    store = Store(state / "snapshots")
    bring_back(store, "one", identity=who_am_i(store))
    signal.pause()


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
