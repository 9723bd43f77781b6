# SPDX-License-Identifier: Apache-2.0
"""The loader and the sleep mode in the real vLLM on a real GPU, with a random 1 GB Llama.

The order is that of the file: plain vLLM, a first start that publishes, one without a vault, hits.
"""

import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_stand import (
    CHILDREN,
    MIB,
    SLACK_BYTES,
    Child,
    Vault,
    near,
    say,
    used_bytes,
    wait_for_used,
)
from warmhold_wcache.client import VaultClient
from warmhold_wcache.verify import check_resident

START_S, STEP_S = 240.0, 90.0
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"
)
# What one start found, for those after it.
found: dict[str, Any] = {}


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    """A checkpoint old enough that the digest of its files is kept."""
    sys.path.append(str(CHILDREN.parent / "contract"))
    from random_llama import write_random_llama

    with tempfile.TemporaryDirectory(prefix="random-") as folder:
        path = Path(folder) / "llama"
        wanted = int(os.environ.get("WARMHOLD_GPU_TEST_BYTES", 10**9))
        found["bytes"] = write_random_llama(path, wanted)
        time.sleep(2.5)
        yield path


@pytest.fixture(scope="module")
def empty(vault: Vault) -> int:
    """Bytes in use before the first engine."""
    vault.drop_all()
    return used_bytes()


def start(model: Path, vault: Vault, load_format: str = "warmhold", **job: Any) -> Child:
    """Start an engine; `found["now"]` is what it says once it has answered."""
    extra = {"socket_path": str(vault.socket), "digests": str(vault.folder / "digests")}
    if load_format == "warmhold":
        job["extra"] = {**extra, "report": str(vault.folder), **job.pop("extra", {})}
    whole = {"model": str(model), "load_format": load_format, **job}
    before = used_bytes()
    child = Child("engine_child.py", json.dumps(whole))
    try:
        seen = child.hear(START_S)
    except BaseException:
        child.kill()
        raise
    for name in ("start_s", "blocks", "look"):
        say(f"{name} = {seen[name]}")
    say(f"in use {before >> 20} MiB before, {seen['used'] >> 20} MiB now")
    found["now"] = seen
    return child


def read_report(vault: Vault, pid: int) -> dict[str, Any]:
    """What the loader of a process wrote."""
    (path,) = vault.folder.glob(f"weights-{pid}-*.json")
    report = json.loads(path.read_text())
    say(f"loader: {report}")
    return dict(report)


def same_answers(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Say in how many prompts two starts agree; tell whether in all, log-probabilities too."""
    pairs = list(zip(one["answers"], other["answers"], strict=True))
    tokens = sum([t for t, _ in a] == [t for t, _ in b] for a, b in pairs)
    whole = sum(a == b for a, b in pairs)
    say(f"of {len(pairs)} prompts {tokens} have equal tokens, {whole} equal log-probabilities too")
    return whole == len(pairs)


def check_rounds(
    child: Child, seen: dict[str, Any], sleeps: list[str], freed: int = 15 << 30, shared: int = 1
) -> None:
    """Every sleep frees the KV cache and unmaps the weights; every answer afterwards is equal."""
    problems = []
    pool = seen["look"]["pool"]
    theirs = sum(pool.get(tag, 0) for tag in ("weights", "runtime", "cudagraph"))
    for index, how in enumerate(sleeps):
        slept = child.go_on(STEP_S) if index == 0 else child.hear(STEP_S)
        names = ("sleep_s", "wake_s", "freed", "copied", "after", "errors", "state")
        shown = {name: slept[name] for name in names}
        say(f"{how}: {shown}")
        checks = {
            "errors": not slept["errors"],
            "mapped": [g["mapped"] for g in slept["state"]["generations"]] == [False] * shared,
            "freed": slept["freed"] > freed,
            # Most of what vLLM itself would copy are counters of penalties, and zeros.
            "copied": not shared or slept["copied"] <= max(theirs // 2, 64 * MIB),
            "after": abs(slept["after"]) < 512 * MIB,
            "answers": same_answers(slept, seen),
        }
        problems += [f"{index} {how}: {name}" for name, right in checks.items() if not right]
    assert not problems


def test_plain_vllm(vault: Vault, model: Path, empty: int) -> None:
    with start(model, vault, "auto") as child:
        found["plain"] = found["now"]
        child.kill()
    wait_for_used(near(empty))


def test_a_first_start_publishes(vault: Vault, model: Path, empty: int) -> None:
    sleeps = ["sleep", "quiesce"]
    with start(model, vault, sleep=sleeps, extra={"source": "auto"}) as child:
        seen = found["disk"] = found["now"]
        report = read_report(vault, seen["pid"])
        assert report["published"], report
        assert seen["look"]["shared"] == seen["look"]["parameters"] > 0
        # The pool has vLLM's own state too.
        assert seen["look"]["pool"].get("weights", 0) < found["bytes"] // 2, "held twice"
        check_rounds(child, seen, sleeps)
    with VaultClient(vault.socket) as client:
        found["resident"] = sum(row["bytes"] for row in client.stat())
    left = wait_for_used(near(empty + found["resident"]))
    say(f"killed; resident {left - empty >> 20} MiB for {found['bytes'] >> 20} MiB of weights")
    assert near(empty + found["resident"])(left)
    assert found["resident"] < 1.03 * found["bytes"]  # segments are not full to the last byte
    if "plain" in found:
        assert same_answers(seen, found["plain"]), "other than plain vLLM's"
        assert abs(seen["blocks"] - found["plain"]["blocks"]) <= 0.02 * seen["blocks"]


def test_a_start_without_a_vault(vault: Vault, model: Path, empty: int) -> None:
    """Its weights are where vLLM has them, and leave the GPU while it sleeps."""
    before = used_bytes()
    socket_path = str(vault.folder / "none.sock")
    job = {"extra": {"source": "auto", "socket_path": socket_path}, "sleep": ["sleep"]}
    with start(model, vault, **job) as child:
        seen = found["now"]
        report = read_report(vault, seen["pid"])
        assert report["not_published"] and not report["published"], report
        assert seen["look"]["shared"] == 0
        assert seen["look"]["pool"]["weights"] >= found["bytes"]
        freed = found["bytes"] + seen["look"]["pool"]["kv_cache"]
        check_rounds(child, seen, ["sleep"], freed, shared=0)
    if "plain" in found:
        assert same_answers(seen, found["plain"]), "other than plain vLLM's"
    wait_for_used(near(before))


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_a_hit(vault: Vault, model: Path, empty: int, graphs: bool) -> None:
    sleeps = ["sleep", "quiesce", "sleep-2", "sleep"]
    job = {"extra": {"source": "ipc_cache"}, "sleep": sleeps, "graphs": graphs}
    with start(model, vault, **job) as child:
        seen = found["now"]
        report = read_report(vault, seen["pid"])
        assert report["mode"] == "ipc_cache", report
        assert seen["look"]["shared"] == seen["look"]["parameters"] > 0
        say(f"mapped read-only: {seen['look']['read_only']}")
        check_rounds(child, seen, sleeps)
    same = same_answers(seen, found["disk"])
    if not graphs:  # which compute in other shapes
        assert same, "other than the first start's"
        blocks = (seen["blocks"], found["disk"]["blocks"])
        assert abs(blocks[0] - blocks[1]) <= 0.02 * blocks[1], blocks
    wait_for_used(near(empty + found["resident"]))


def test_a_hit_of_weights_that_exceed_the_share(vault: Vault, model: Path, empty: int) -> None:
    """With the KV cache's size given the share sizes nothing, as in a start from disk."""
    job = {"extra": {"source": "ipc_cache"}, "share": 0.004, "kv_bytes": 1 << 30}
    with start(model, vault, **job) as child:
        assert read_report(vault, found["now"]["pid"])["mode"] == "ipc_cache"
        assert same_answers(found["now"], found["disk"]), "other than the first start's"
        child.kill()
    wait_for_used(near(empty + found["resident"]))


def test_afterwards_the_bytes_are_sound_and_can_be_dropped(vault: Vault, empty: int) -> None:
    with VaultClient(vault.socket) as client:
        (row,) = client.stat()
        report = check_resident(client, row)
        say(report.line())
        assert report.sound
        client.drop(row["id"], force=True)
    left = wait_for_used(near(empty))
    say(f"{left - empty >> 20} MiB more than before all engines")
    assert left <= empty + SLACK_BYTES
