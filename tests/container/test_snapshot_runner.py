# SPDX-License-Identifier: Apache-2.0
"""The runner and the real criu around the small engine: often, in new containers, with kills.

What a real engine adds is in `test_snapshot_engine.py`; here a restore takes a fifth of a second.
"""

import json
import re
import uuid
from collections.abc import Callable, Iterator

import pytest
from box import Box
from docker.models.volumes import Volume
from stack import eventually

from docker import DockerClient

pytestmark = pytest.mark.container
RIGHTS = ["SYS_ADMIN", "SYS_PTRACE", "NET_ADMIN", "SYS_TIME"]
SNAPSHOTS = "/var/lib/warmhold/snapshots"
VICTIMS = ("entrypoint[.]maker", "criu dump", "criu restore", "entrypoint[.]engine", "vllm serve")
Run = Callable[..., Box]


@pytest.fixture
def state(engine: DockerClient) -> Iterator[Volume]:
    volume = engine.volumes.create(f"warmhold-runner-{uuid.uuid4().hex[:8]}")
    yield volume
    volume.remove(force=True)


@pytest.fixture
def serve(state: Volume, run_fake: Run) -> Run:
    """Run the image with the rights and a state volume of its own."""

    def run(*command: str, compress: bool = False, **options: object) -> Box:
        options.setdefault("volumes", {state.name: {"bind": "/var/lib/warmhold", "mode": "rw"}})
        environment = {"FAKE_VLLM_DUMPABLE": "1", "WARMHOLD_SNAPSHOT": "manual"}
        environment["WARMHOLD_SNAPSHOT_COMPRESS"] = str(compress).lower()
        rights = {"cap_add": RIGHTS, "security_opt": ["seccomp=unconfined"]}
        box = run_fake(*command, environment=environment, **rights, **options)
        box.wait_ready()
        return box

    return run


def create(box: Box, name: str = "one") -> None:
    code, text = box.run("snapshot", "create", "--name", name)
    assert code == 0, text + box.log()[-4000:]


def restore(box: Box, name: str = "one") -> None:
    code, text = box.run("snapshot", "restore", name)
    assert code == 0, text + box.log()[-4000:]
    status = box.wait_ready()
    assert (status["mode"], status["snapshot"]) == ("snapshot", name)


def measure(box: Box) -> dict[str, int]:
    """What restores could leave behind."""
    status = box.wait_ready()
    folder = f"/proc/{status['runner_pid']}"
    memory = box.run("cat", f"{folder}/status")[1]
    count = f"ls {folder}/fd | wc -l"
    zombies = "grep -l '^State:.Z' /proc/[0-9]*/status"
    eventually(lambda: not box.run("sh", "-c", zombies)[1], "that all is reaped")
    return {
        # The prober's sockets come and go: the least of several looks is what stays.
        "descriptors": min(int(box.run("sh", "-c", count)[1]) for _ in range(5)),
        "shm": len(box.shm_files()),
        "processes": len(box.tree()),
        "temporary": len(box.run("sh", "-c", f"ls -d {SNAPSHOTS}/.tmp-* /tmp/* 2>/dev/null")[1]),
        "rss_kib": int(memory.split("VmRSS:")[1].split()[0]),
    }


def require_no_leak(before: dict[str, int], after: dict[str, int]) -> None:
    rss_kib = after.pop("rss_kib")
    assert rss_kib < 1.5 * before["rss_kib"], (before, rss_kib)
    assert after == {name: value for name, value in before.items() if name != "rss_kib"}


@pytest.mark.parametrize("compress", [False, True], ids=["plain", "lz4"])
@pytest.mark.parametrize("count", [10, pytest.param(50, marks=pytest.mark.full)])
def test_restores_one_after_the_other(serve: Run, count: int, compress: bool) -> None:
    box = serve(compress=compress)
    create(box)
    tree = set(box.tree())
    restore(box)
    before = measure(box)
    for _ in range(count):
        restore(box)
        assert set(box.tree()) == tree
    require_no_leak(before, measure(box))


@pytest.mark.parametrize("count", [2, pytest.param(10, marks=pytest.mark.full)])
def test_new_containers(serve: Run, state: Volume, count: int) -> None:
    first = serve()
    create(first)
    tree = set(first.tree())
    first.container.stop()
    script = "for i in $(seq 200); do sleep 1000 & done; exec warmhold"
    for number in range(count):
        box = serve("-c", script, entrypoint=["sh"], hostname=f"another-{number}")
        status = box.wait_ready()
        assert (status["mode"], status["weights"]["mode"]) == ("snapshot", "flat"), box.log()[
            -4000:
        ]
        assert set(box.tree()) == tree
        restore(box)
        box.container.kill()


@pytest.mark.parametrize("points", [2, pytest.param(8, marks=pytest.mark.full)])
def test_kills_at_any_moment(serve: Run, points: int) -> None:
    """Of whatever takes part, while a snapshot is made and while one is restored."""
    box = serve(compress=True)
    create(box)
    seen = []
    for victim in VICTIMS:
        for act in ("create --name two", "restore one"):
            for point in range(points):
                delay_s = 0.05 + 0.3 * point / points
                script = f"snapshot {act} & sleep {delay_s}; pkill -KILL -f '{victim}'; wait"
                _, text = box.run("sh", "-c", script)
                box.wait_ready()
                seen.append((victim, act, round(delay_s, 2), text.strip()[:100]))
                listed = json.loads(box.run("snapshot", "list", "--json")[1])
                assert {row["name"] for row in listed} <= {"one", "two"}, seen[-1]
                assert all(row["state"] != "damaged" for row in listed), (seen[-1], listed)
    print(*seen, sep="\n")
    create(box, "last")
    restore(box, "last")
    assert ".tmp-" not in box.run("ls", "-A", SNAPSHOTS)[1]
    assert len(box.tree()) == 3 and len(box.shm_files()) == 1
    assert not re.search(r"ERROR \S+ bug", box.log())


@pytest.mark.full
def test_a_disk_that_fills_up_meanwhile(serve: Run) -> None:
    box = serve(volumes={}, tmpfs={"/var/lib/warmhold": "size=400m,mode=0755"})
    before = box.tree().keys()
    script = f"""
        snapshot create --name two & until ls {SNAPSHOTS}/.tmp-*/dump.log; do :; done
        dd if=/dev/zero of=/var/lib/warmhold/filler bs=1M; wait $!
    """
    text = box.run("sh", "-c", script)[1]
    box.wait_ready()
    print(text[-600:])
    assert box.run("rm", "/var/lib/warmhold/filler")[0] == 0
    listed = json.loads(box.run("snapshot", "list", "--json")[1])
    assert listed == [] or listed[0]["state"] == "usable"
    assert box.tree().keys() == before
    create(box)
    restore(box)
