# SPDX-License-Identifier: Apache-2.0
"""Snapshots of a small tree in the built image, under the real criu.

`tests/contract/snapshot_tree.py` in one container, and its artifact in another that has never seen
the tree.
"""

import json
import os
import uuid
from collections.abc import Iterator

import pytest
from docker.errors import ContainerError
from docker.models.networks import Network
from docker.models.volumes import Volume
from stack import ROOT

from docker import DockerClient

IMAGE = os.environ.get("WARMHOLD_IMAGE", "warmhold:cpu")
RIGHTS = ["SYS_ADMIN", "SYS_PTRACE", "NET_ADMIN", "SYS_TIME"]
pytestmark = pytest.mark.container


@pytest.fixture(scope="module")
def state(engine: DockerClient) -> Iterator[Volume]:
    volume = engine.volumes.create(f"warmhold-tree-{uuid.uuid4().hex[:8]}")
    yield volume
    volume.remove(force=True)


@pytest.fixture
def network(engine: DockerClient) -> Iterator[Network]:
    """Addresses that no other container has."""
    network = engine.networks.create(f"warmhold-tree-{uuid.uuid4().hex[:8]}")
    yield network
    network.remove()


def run(engine: DockerClient, act: str, state: Volume, **options: object) -> None:
    try:
        output = engine.containers.run(
            IMAGE,
            ["/contract/snapshot_tree.py", act, "/state"],
            entrypoint=["/opt/warmhold/venv/bin/python"],
            cap_add=RIGHTS,
            security_opt=["seccomp=unconfined"],
            shm_size="1g",
            tmpfs={"/small": "size=40m"},
            volumes={
                str(ROOT / "tests/contract"): {"bind": "/contract", "mode": "ro"},
                state.name: {"bind": "/state", "mode": "rw"},
            },
            remove=True,
            stderr=True,
            **options,
        )
    except ContainerError as error:
        logged = error.stderr.decode(errors="replace")
        pytest.fail(f"snapshot_tree.py {act}: {logged[-8000:]}")
    text = output.decode(errors="replace")
    print(text)
    assert "all passed" in text and "FAIL" not in text


def test_five_restores_in_one_container(engine: DockerClient, state: Volume) -> None:
    run(engine, "make", state)


def test_a_restore_in_a_new_container(
    engine: DockerClient, state: Volume, network: Network
) -> None:
    run(engine, "fresh", state, network=network.name, hostname="another")


def test_check_names_every_right_that_is_missing(engine: DockerClient) -> None:
    container = engine.containers.run(
        IMAGE, ["check", "--json"], entrypoint=["snapshot"], detach=True
    )
    try:
        assert container.wait()["StatusCode"] == 77
        points = json.loads(container.logs(stderr=False))["points"]
    finally:
        container.remove(force=True)
    missing = {point["name"]: point["remedy"] for point in points if not point["ok"]}
    assert {f"CAP_{name}" for name in RIGHTS} | {"seccomp"} <= set(missing)
    assert missing["CAP_SYS_TIME"] == "compose.yaml: cap_add: [SYS_TIME]"
    assert all(missing.values())
