# SPDX-License-Identifier: Apache-2.0
"""The real engine, snapshotted while it serves and brought back. Tests share a stack, in order."""

import json
import re
import textwrap
from typing import Any

import pytest
from box import Box, RealStack
from stack import eventually
from storm import Storm

pytestmark = pytest.mark.container
SEEN: dict[str, Any] = {}
FOLDER = "/var/lib/warmhold/snapshots"
KINDS = {"front": "vllm serve", "core": "VLLM::EngineCore"}


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
    SEEN.setdefault("descriptors", runner_descriptors(eager))
    return status


def core_affinity(eager: Box) -> str:
    """The CPUs on which the thread that computes may run."""
    return eager.run("grep", "Cpus_allowed_list", f"/proc/{find(eager, 'core')}/status")[1]


def zombies(eager: Box) -> str:
    return eager.run("sh", "-c", "grep -l '^State:.Z' /proc/[0-9]*/status")[1]


def runner_descriptors(eager: Box) -> int:
    status = eager.status()
    assert status
    script = f"ls /proc/{status['runner_pid']}/fd | wc -l"
    return int(eventually(lambda: eager.run("sh", "-c", script)[1].strip(), "a count"))


def test_check_passes(eager: RealStack) -> None:
    code, text = eager.run("snapshot", "check")
    assert code == 0, text


def test_a_serving_engine_is_snapshotted_and_goes_on(eager: RealStack) -> None:
    SEEN["answers"], SEEN["tree"] = eager.answers(), set(eager.tree())
    SEEN["many"] = eager.complete_many(200, 16)
    SEEN["shm"] = len(eager.shm_files())
    SEEN["affinity"] = core_affinity(eager)
    SEEN["anonymous"] = eager.anonymous_bytes()
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
    assert core_affinity(eager) == SEEN["affinity"]


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


@pytest.mark.parametrize("rounds", [2, pytest.param(10, marks=pytest.mark.full)])
def test_clients_meanwhile_get_an_answer_or_503(eager: RealStack, rounds: int) -> None:
    for round_number in range(rounds):
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


@pytest.mark.parametrize(
    "victim", ["warmhold_entrypoint[.]maker", "criu dump", "entrypoint[.]engine"]
)
def test_kills_while_one_is_made(eager: RealStack, victim: str) -> None:
    """Of the maker, of criu with the engine frozen, and of the runner."""
    script = f"""
        snapshot create --name busy & until ls {FOLDER}/.tmp-*/dump.log; do sleep 0.01; done
        pkill -KILL -f '{victim}'; wait
    """
    began = len(eager.log())
    _, text = eager.run("sh", "-c", script)
    print(victim, text[-300:])
    eventually(lambda: "READY" in eager.log()[began:] or eager.tree(), "an engine")
    eager.wait_ready()
    assert eager.answers() == SEEN["answers"]
    listed = json.loads(eager.run("snapshot", "list", "--json")[1])
    assert {row["name"] for row in listed} <= {"one", "busy"}


@pytest.mark.parametrize("damage", ["truncate -s -1 pages-1.img", "rm core-*.img"])
def test_visible_damage_costs_no_restart(eager: RealStack, damage: str) -> None:
    images = f"{FOLDER}/busy/images"
    assert eager.run("sh", "-c", f"cp -a {images} /tmp/kept && cd {images} && {damage}")[0] == 0
    before = eager.wait_ready()["starts"]
    code, text = eager.run("snapshot", "restore", "busy")
    assert code == 74 and "snapshot.damaged" in text, text
    assert eager.wait_ready()["starts"] == before
    script = f"rm -r {images} && mv /tmp/kept {images}"
    assert eager.run("sh", "-c", script)[0] == 0


def test_a_flipped_bit_is_followed_by_the_next_mode(eager: RealStack) -> None:
    script = f"""
        cd {FOLDER}/busy/images && python3 -c "
        with open('pages-1.img', 'r+b') as file:
            file.seek(123456); byte = file.read(1)[0]; file.seek(123456)
            file.write(bytes([byte ^ 1]))"
    """
    assert eager.run("sh", "-c", textwrap.dedent(script))[0] == 0
    code, text = eager.run("snapshot", "restore", "busy")
    assert code == 74 and "snapshot.damaged" in text, text
    status = eager.wait_ready()
    assert status["mode"] == "ipc_cache"
    assert eager.answers() == SEEN["answers"]
    code, text = eager.run("snapshot", "restore")
    assert code == 0 and "one" in text, "the other one still fits"


def test_nothing_is_left_of_all_that(eager: RealStack) -> None:
    eager.wait_ready()
    assert len(eager.shm_files()) <= SEEN["shm"]
    assert set(eager.tree()) == SEEN["tree"]
    eventually(lambda: not zombies(eager), "no process that nobody reaps")
    assert eager.anonymous_bytes() < 1.1 * SEEN["anonymous"]
    assert runner_descriptors(eager) <= SEEN["descriptors"]


def test_a_right_that_is_missing_is_named_and_nothing_is_frozen(guarded: RealStack) -> None:
    before, starts = guarded.tree(), guarded.wait_ready()["starts"]
    code, text = guarded.run("snapshot", "check")
    assert code != 0 and "SYS_ADMIN" in text
    code, text = guarded.run("snapshot", "create")
    assert code == 77 and "SYS_ADMIN" in text, text
    assert set(guarded.tree()) == set(before)
    assert guarded.wait_ready()["starts"] == starts
