# SPDX-License-Identifier: Apache-2.0
"""The real engine, snapshotted while it serves and brought back. Tests share a stack, in order."""

import json
import re
from typing import Any
from urllib.error import HTTPError

import pytest
from box import EAGER, PATIENCE_S, Box, RealStack
from stack import eventually
from storm import Storm

from docker import DockerClient

pytestmark = pytest.mark.container
SEEN: dict[str, Any] = {}
KINDS = {"front": "vllm serve", "core": "VLLM::EngineCore", "worker": "VLLM::Worker"}


def find(eager: Box, kind: str) -> int:
    return next(pid for pid, item in eager.tree().items() if KINDS[kind] in item["command"])


def restored(eager: RealStack, kind: str) -> dict[str, Any]:
    """Kill a process of the engine; return the status once it has been restored."""
    before, tree = eager.wait_ready(), eager.tree()
    assert eager.run("kill", "-9", str(find(eager, kind)))[0] == 0
    status = eager.wait_ready(starts=before["starts"] + 1)
    assert (status["mode"], status["snapshot"]) == ("snapshot", "one"), eager.log()[-6000:]
    assert set(eager.tree()) == set(tree), "every process has its number back"
    print(f"{kind}: {status['total_s']:.2f} s {status['phases']}")
    return status


def test_check_passes(eager: RealStack) -> None:
    code, text = eager.run("snapshot", "check")
    assert code == 0, text


def test_a_serving_engine_is_snapshotted_and_goes_on(eager: RealStack) -> None:
    SEEN["answers"], SEEN["tree"] = eager.answers(), set(eager.tree())
    SEEN["many"] = eager.complete_many(200, 16)
    code, text = eager.run("snapshot", "create", "--name", "one", "--json")
    assert code == 0, text + eager.log()[-6000:]
    report = json.loads(text)
    print({name: report[name] for name in ("pause_s", "frozen_s", "image_bytes", "seconds")})
    print(report["bytes_by_process"], report["notes"])
    assert eager.wait_ready()["mode"] == "disk"
    assert set(eager.tree()) == SEEN["tree"]
    assert eager.answers() == SEEN["answers"]
    assert min(SEEN["tree"]) > 1000
    assert "one" in eager.run("snapshot", "list")[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_engine_is_restored(eager: RealStack, kind: str) -> None:
    status = restored(eager, kind)
    assert status["phases"]["unaccounted"] < 0.05 * status["total_s"]
    assert status["weights"]["bytes"] == sum(row["bytes"] for row in eager.vault())
    assert eager.answers() == SEEN["answers"]


def test_its_log_goes_on(eager: RealStack) -> None:
    eager.complete()
    since_ready = eager.log().rpartition("READY")[2]
    assert "POST /v1/completions" in since_ready
    said_by = re.findall(r"^\(APIServer pid=(\d+)\)", eager.log().rpartition("restoring")[2], re.M)
    assert {int(pid) for pid in said_by} == {find(eager, "front")}


def test_two_restores_do_not_repeat_each_other(eager: RealStack) -> None:
    samples = []
    for _ in range(2):
        restored(eager, "front")
        samples.append(eager.complete(32, temperature=1.5, ignore_eos=True))
    assert samples[0] != samples[1]


def test_supervisorctl_restart_restores(eager: RealStack) -> None:
    code, text = eager.run("supervisorctl", "restart", "engine")
    assert code == 0 and "ready in mode snapshot" in text, text
    assert eager.answers() == SEEN["answers"]


def test_the_engine_has_no_rights_after_a_restore(eager: RealStack) -> None:
    for fields in eager.tree().values():
        assert int(fields["CapPrm"], 16) == int(fields["CapBnd"], 16) == 0
        assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")


def test_a_loaded_engine_answers_as_before(eager: RealStack) -> None:
    """200 requests, 16 at a time, of a restored engine and of one that loaded its weights itself
    differ in no more answers than two rounds of the latter do."""
    assert eager.wait_ready()["mode"] == "snapshot"
    assert eager.complete_many(200, 16) == SEEN["many"]


def test_clients_meanwhile_get_an_answer_or_503(eager: RealStack) -> None:
    for round_number in range(2):
        with Storm(eager.port) as storm:
            eventually(lambda found=storm: len(found.statuses) > 16, "answers")
            code, text = eager.run("snapshot", "create", "--name", "busy", "--json")
            eager.wait_ready()
            answered = len(storm.statuses)
            eventually(lambda found=storm, n=answered: len(found.statuses) > n + 16, "answers")
        print(round_number, code, storm.count(), storm.broken[:5])
        assert code == 0, text
        assert storm.broken == []
        assert set(storm.statuses) == {200, 503}
    assert eager.run("snapshot", "restore", "busy")[0] == 0
    assert eager.wait_ready()["snapshot"] == "busy"
    assert eager.answers() == SEEN["answers"]


def test_the_hubs_token_is_in_no_image(eager: RealStack) -> None:
    code, text = eager.run("grep", "-rlE", "hf_secret42", "/var/lib/warmhold/snapshots")
    assert (code, text) == (1, "")


def test_a_damaged_one_is_followed_by_the_next_mode(eager: RealStack) -> None:
    script = "cd /var/lib/warmhold/snapshots/busy/images && truncate -s -1 pages-1.img"
    assert eager.run("sh", "-c", script)[0] == 0
    code, text = eager.run("snapshot", "restore", "busy")
    assert code == 74 and "snapshot.damaged" in text, text
    status = eager.wait_ready()
    assert status["mode"] == "ipc_cache"
    assert eager.answers() == SEEN["answers"]
    code, text = eager.run("snapshot", "restore")
    assert code == 0 and "one" in text, "the other one still fits"


def test_a_right_that_is_missing_is_named_and_nothing_is_frozen(guarded: RealStack) -> None:
    before = guarded.tree()
    code, text = guarded.run("snapshot", "check")
    assert code != 0 and "SYS_ADMIN" in text
    code, text = guarded.run("snapshot", "create")
    assert code == 77 and "SYS_ADMIN" in text, text
    assert set(guarded.tree()) == set(before)
    assert guarded.wait_ready()["starts"] == 1


def test_a_new_container_is_served_from_the_volume(eager: RealStack, engine: DockerClient) -> None:
    """Another host name, another address, and two hundred processes before ours."""
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
            assert other.answers() == SEEN["answers"]
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
            assert other.run("kill", "-9", str(find(other, "front")))[0] == 0
            eventually(lambda n=starts: other.log().count("READY") == n, "a restore", PATIENCE_S)
            assert other.wait_ready()["mode"] == "snapshot"
            with pytest.raises(HTTPError) as caught:
                other.complete()
            assert caught.value.code == 401
            assert other.answers(key="sk-new-42") == answers
