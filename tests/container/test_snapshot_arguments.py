# SPDX-License-Identifier: Apache-2.0
"""Snapshots of engines that are more than one model in one process: each is made while it serves,
restored, killed and restored again, with the same answers."""

import json
import os
from typing import Any

import pytest
from box import EAGER, PATIENCE_S, REAL_STARTS, Copy
from stack import ROOT, eventually

from docker import DockerClient

pytestmark = [pytest.mark.container, pytest.mark.full]
IMAGE = os.environ.get("WARMHOLD_IMAGE", "warmhold:cpu")
DEMO, LORA = "/opt/warmhold/demo", "/tmp/lora"
DRAFT = {"method": "draft_model", "model": DEMO, "num_speculative_tokens": 3}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
RIGHTS: dict[str, Any] = {
    "cap_add": ["SYS_ADMIN", "SYS_PTRACE", "NET_ADMIN", "SYS_TIME"],
    "security_opt": ["seccomp=unconfined"],
    "shm_size": "1g",
}
ENGINES = {
    "lora": ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"adapted={LORA}"],
    "ngram": ["--speculative-config", json.dumps(NGRAM)],
    "draft": ["--speculative-config", json.dumps(DRAFT)],
    "tensor-parallel": ["--tensor-parallel-size", "3"],  # as many as the model has key heads
}


@pytest.mark.parametrize("kind", ENGINES)
def test_restored_with_the_same_answers(engine: DockerClient, kind: str) -> None:
    make = f"python /contract/random_lora.py {DEMO} {LORA}"
    container = engine.containers.run(
        IMAGE,
        ["-c", f'{make}; exec warmhold "$@"', "sh", *EAGER, *ENGINES[kind]],
        entrypoint=["sh"],
        detach=True,
        ports={"8000/tcp": ("127.0.0.1", None)},
        volumes={str(ROOT / "tests/contract"): {"bind": "/contract", "mode": "ro"}},
        environment={"WARMHOLD_KV_CACHE_GIB": "1", "WARMHOLD_SNAPSHOT": "manual"},
        **RIGHTS,
    )
    try:
        box = Copy(container)
        models = ["demo", "adapted"] if kind == "lora" else ["demo"]

        def answers() -> list[Any]:
            return [box.answers(model=model) for model in models]

        assert box.wait_ready()["mode"] == "disk"
        wanted = answers()
        assert kind != "lora" or wanted[0] != wanted[1], "the adapter changes answers"
        code, text = box.run("snapshot", "create", "--name", "one")
        assert code == 0, text + box.log()[-6000:]
        print(text)
        assert answers() == wanted
        tree = set(box.tree())
        code, text = box.run("snapshot", "restore", "one")
        assert code == 0, text + box.log()[-6000:]
        print(text)
        assert answers() == wanted
        assert box.run("kill", "-9", str(max(tree)))[0] == 0
        eventually(lambda: box.log().count("READY") == 3, "the third start", PATIENCE_S)
        assert box.wait_ready(starts=3)["mode"] == "snapshot", box.log()[-6000:]
        assert set(box.tree()) == tree
        assert answers() == wanted
    finally:
        REAL_STARTS[f"arguments-{kind}"] = container.logs().decode().count("engine starting")
        container.remove(force=True, v=True)
