# SPDX-License-Identifier: Apache-2.0
"""A snapshot of the real engine in containers that have never seen it, over one state volume.

Runs after `test_snapshot_engine.py`, whose stack it stops.
"""

from urllib.error import HTTPError

import pytest
from box import EAGER, PATIENCE_S, RealStack
from stack import eventually

from docker import DockerClient

pytestmark = pytest.mark.container


def test_a_new_container_is_served_from_the_volume(eager: RealStack, engine: DockerClient) -> None:
    """Another host name, another address, and two hundred processes before ours."""
    wanted = eager.answers()
    assert eager.run("snapshot", "create", "--name", "one")[0] == 0
    eager.container.stop()
    script = f"for i in $(seq 200); do sleep 1000 & done; exec warmhold {' '.join(EAGER)}"
    network = engine.networks.create("warmhold-eager-other")
    options = {"entrypoint": ["sh"], "hostname": "another", "network": network.name}
    try:
        with eager.copied(["-c", script], {}, **options) as other:
            status = other.wait_ready()
            assert (status["mode"], status["snapshot"]) == ("snapshot", "one"), other.log()[-6000:]
            assert status["weights"]["mode"] == "flat"
            print(f"new container: {status['total_s']:.2f} s {status['phases']}")
            assert other.answers() == wanted
            assert "engine starting" not in other.log()
    finally:
        network.remove()


def test_a_changed_key_revokes_it_and_a_new_one_is_made_by_itself(eager: RealStack) -> None:
    """The old way in gets 401, and no artifact lets anybody in by it any more."""
    environment = {"WARMHOLD_API_KEY": "sk-new-42"}
    environment |= {"WARMHOLD_SNAPSHOT": "auto", "WARMHOLD_SNAPSHOT_IDLE_S": "2"}
    with eager.copied(EAGER, environment) as other:
        eventually(lambda: "READY" in other.log(), "the first start", PATIENCE_S)
        status = other.status()
        assert status
        reason = next(item for item in status["rejections"] if item["mode"] == "snapshot")
        assert reason["code"] == "snapshot.identity-mismatch" and "api_key" in reason["detail"]
        assert "one" not in other.run("snapshot", "list")[1].split()
        eventually(lambda: "snapshot made" in other.log(), "the snapshot", PATIENCE_S)
        other.wait_ready()
        answers = other.answers(key="sk-new-42")
        for starts in (2, 3):
            assert other.run("kill", "-9", str(min(other.tree())))[0] == 0
            eventually(lambda n=starts: other.log().count("READY") == n, "a restore", PATIENCE_S)
            assert other.wait_ready()["mode"] == "snapshot"
            with pytest.raises(HTTPError) as caught:
                other.complete()
            assert caught.value.code == 401
            assert other.answers(key="sk-new-42") == answers
