# SPDX-License-Identifier: Apache-2.0
"""All that differs from the default in one real start: rights, TLS, key, path, uid, hub cache."""

import urllib.error

import pytest
from box import RealStack

pytestmark = pytest.mark.container
BODY = {
    "model": "warmhold/demo",
    "prompt": "The capital of France is",
    "max_tokens": 8,
    "temperature": 0,
}


def test_it_is_ready_and_answers_with_the_key_alone(guarded: RealStack) -> None:
    answer = guarded.ask("/llm/v1/completions", BODY, key="sk-container-42", tls=True)
    assert "Paris" in answer["choices"][0]["text"]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        guarded.ask("/llm/v1/completions", BODY, key="wrong", tls=True)
    assert guarded.bad_lines() == []
    status = guarded.status()
    assert status
    assert status["url"] == "https://127.0.0.1:8000/llm"


def test_the_engine_has_another_uid_and_no_rights(guarded: RealStack) -> None:
    tree = guarded.tree()
    assert len(tree) >= 3
    for fields in tree.values():
        assert fields["Uid"].split() == ["10001"] * 4
        assert int(fields["CapPrm"], 16) == int(fields["CapBnd"], 16) == 0


def test_the_container_has_no_extra_rights(guarded: RealStack) -> None:
    host = guarded.container.attrs["HostConfig"]
    assert not host["CapAdd"]
    assert not host["SecurityOpt"]


def test_the_key_is_in_no_log_and_no_argv(guarded: RealStack) -> None:
    shown = guarded.log() + guarded.run("warmhold", "plan", "--json")[1]
    shown += guarded.run("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")[1]
    assert "sk-container-42" not in shown


def test_the_model_was_found_in_the_mounted_cache(guarded: RealStack) -> None:
    assert "directory=/models/models--warmhold--demo/snapshots/c0ffee" in guarded.log()


def test_without_any_right_weights_stay_resident(guarded: RealStack) -> None:
    asked = {"path": "/llm", "model": "warmhold/demo", "key": "sk-container-42", "tls": True}
    first = guarded.wait_ready()
    assert first["mode"] == "disk"
    answers = guarded.answers(**asked)
    front = next(pid for pid, item in guarded.tree().items() if "vllm serve" in item["command"])
    assert guarded.run("kill", "-9", str(front))[0] == 0
    second = guarded.wait_ready(starts=2)
    assert second["mode"] == "ipc_cache"
    assert guarded.answers(**asked) == answers


def test_the_engine_may_not_use_the_supervision(guarded: RealStack) -> None:
    code, text = guarded.run("supervisorctl", "status", user="10001")
    assert code == 77
    assert "docker exec -u 0" in text
