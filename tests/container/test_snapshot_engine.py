# SPDX-License-Identifier: Apache-2.0
"""The real engine, snapshotted while it serves and brought back. Tests share a stack, in order."""

import json
import re
import threading
from typing import Any

import pytest
from box import RealStack
from stack import eventually

pytestmark = pytest.mark.container
SEEN: dict[str, Any] = {}
KINDS = {"front": "vllm serve", "core": "VLLM::EngineCore", "worker": "VLLM::Worker"}


def find(eager: RealStack, kind: str) -> int:
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
    code, text = eager.run("snapshot", "create", "--name", "one", "--json")
    assert code == 0, text + eager.log()[-6000:]
    report = json.loads(text)
    print({name: report[name] for name in ("pause_s", "frozen_s", "image_bytes", "seconds")})
    print(report["bytes_by_process"], report["notes"])
    assert eager.wait_ready()["mode"] == "disk"
    assert set(eager.tree()) == SEEN["tree"]
    assert eager.answers() == SEEN["answers"]
    assert min(SEEN["tree"]) > 3000
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


def test_clients_meanwhile_get_an_answer_or_503(eager: RealStack) -> None:
    stop, statuses, broken = threading.Event(), [], []

    def ask() -> None:
        import http.client

        while not stop.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", eager.port, timeout=120)
            try:
                for _ in range(3):
                    body = {"model": "demo", "prompt": "One, two,", "max_tokens": 4}
                    headers = {"Content-Type": "application/json"}
                    connection.request("POST", "/v1/completions", json.dumps(body), headers)
                    answer = connection.getresponse()
                    answer.read()
                    statuses.append(answer.status)
            except (OSError, http.client.HTTPException) as error:
                broken.append(repr(error))
            finally:
                connection.close()

    clients = [threading.Thread(target=ask) for _ in range(4)]
    for client in clients:
        client.start()
    eventually(lambda: len(statuses) > 8, "answers")
    code, text = eager.run("snapshot", "create", "--name", "busy", "--json")
    eager.wait_ready()
    eventually(lambda: statuses[-1] == 200, "answers again")
    stop.set()
    for client in clients:
        client.join()
    print(code, {status: statuses.count(status) for status in set(statuses)}, broken[:5])
    assert code == 0, text
    assert set(statuses) == {200, 503}
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
