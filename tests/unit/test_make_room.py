# SPDX-License-Identifier: Apache-2.0
"""What has to be free on a GPU beside the weights in a real vault, and which of them make room."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vault_process import SIZE, close_all, make_generation, running_vault
from warmhold_entrypoint.container.conf import VAULT_SOCKET
from warmhold_entrypoint.errors import Rejection
from warmhold_entrypoint.gpus.gpu_memory import Need
from warmhold_entrypoint.plan import Attempt, Plan
from warmhold_entrypoint.running import groundwork
from warmhold_entrypoint.running.groundwork import Groundwork
from warmhold_entrypoint.running.loop import Loop
from warmhold_entrypoint.settings import read_settings
from warmhold_entrypoint.snapshot_mode.snapshots import Snapshots
from warmhold_entrypoint.weight_cache import weights
from warmhold_entrypoint.weight_cache.room import make_room, measure
from warmhold_wcache.client import VaultClient
from warmhold_wcache.spare import find_spare, find_superseded

DISK = Attempt("disk", ("vllm",))
FAILED = weights.did_not_serve("it ended")
KEY = {"content": "now", "dtype": "half"}
BYTES = 3 * SIZE  # of each generation
GIB = 1 << 30
NEED = Need({"u0": 60 * GIB, "u1": 60 * GIB})


@pytest.fixture
def vault(tmp_path: Path) -> Iterator[Path]:
    """The socket of a vault with weights on two GPUs, two on the first."""
    with running_vault(tmp_path) as (path, _):
        (tmp_path / VAULT_SOCKET).symlink_to(path)
        with VaultClient(path) as client:
            for name, gpu in {"mine": "u0", "other": "u0", "second": "u1"}.items():
                generation, fds = make_generation(name)
                key = {**KEY, "model": name, "device": f"cuda:{gpu}"}
                client.publish(dataclasses.replace(generation, key=key), fds)
                client.release(client.fetch(key)[0].id)
                close_all(fds)
        yield path


def ids(vault: Path) -> dict[str, str]:
    """The id of each of the weights that are resident, by name."""
    with VaultClient(vault) as client:
        return {row["key"]["model"]: row["id"] for row in client.stat()}


def need_of(spare_bytes: int) -> Need:
    """An engine asks for 60 GiB of a GPU that has room for so many bytes more, beside what the
    context of CUDA takes."""
    return Need({"u0": 60 * GIB}, sizes={"u0": 61 * GIB + spare_bytes})


def test_what_is_resident_need_not_be_free(vault: Path, tmp_path: Path) -> None:
    found = measure(tmp_path, NEED).by_uuid
    assert found == {"u0": 60 * GIB - 2 * BYTES, "u1": 60 * GIB - BYTES}


def test_without_a_vault_all_has_to_be(tmp_path: Path) -> None:
    assert measure(tmp_path, NEED) == NEED
    assert make_room(tmp_path, NEED, ()) == NEED


def test_others_make_room_for_a_restored_engine(vault: Path, tmp_path: Path) -> None:
    before = ids(vault)
    kept = {before["mine"]}
    assert make_room(tmp_path, need_of(BYTES), kept).by_uuid == {"u0": 60 * GIB - 2 * BYTES}
    assert ids(vault) == before
    assert make_room(tmp_path, need_of(BYTES - 1), kept).by_uuid == {"u0": 60 * GIB - BYTES}
    assert set(ids(vault)) == {"mine", "second"}


def test_what_a_process_uses_stays(vault: Path, tmp_path: Path) -> None:
    kept = {ids(vault)["mine"]}
    with VaultClient(vault) as client:
        generation, fds = client.fetch({**KEY, "model": "other", "device": "cuda:u0"})
        close_all(fds)
        assert make_room(tmp_path, need_of(0), kept).by_uuid == {"u0": 60 * GIB - 2 * BYTES}
        assert set(ids(vault)) == {"mine", "other", "second"}
        client.release(generation.id)


class Ground:
    """Prepares starts; `waited` has the needs that were waited for, `missing` what was said."""

    def __init__(self, folder: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.loop, self.missing = folder, loop, ""
        self.waited: list[Need] = []
        monkeypatch.setattr(groundwork, "wait_for_memory", self._wait)

    def _wait(self, need: Need, *_: object) -> str:
        self.waited.append(need)
        return self.missing

    def prepare(self, need: Need, *rejections: Rejection) -> None:
        settings = read_settings({"WARMHOLD_RUN_DIR": str(self.folder)}, ())[0]
        plan = Plan(
            *((), rejections, (), {}, "m", "/m", "/c", None, 1, None, {}, Snapshots()),
            launch_key={"argv": "mine"},
            memory=need,
        )
        assert Groundwork(self.loop).prepare(settings, plan, DISK) is None


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    loop = Loop()
    yield Ground(tmp_path, loop, monkeypatch)
    loop.close()


@pytest.mark.parametrize("need", [NEED, Need({})], ids=["gpu", "cpu"])
def test_weights_that_an_engine_did_not_come_up_on_go(
    vault: Path, ground: Ground, need: Need
) -> None:
    ground.prepare(need, dataclasses.replace(FAILED, code="ipc_cache.hung"))
    assert set(ids(vault)) == {"mine", "other", "second"}
    ground.prepare(need, FAILED)
    assert set(ids(vault)) == {"other", "second"}
    resident = {"u0": 2 * BYTES, "u1": BYTES}
    assert ground.waited == [need.beside(resident)] * 2


def test_they_stay_where_the_engine_lacked_memory(vault: Path, ground: Ground) -> None:
    """What it failed for is not they."""
    ground.missing = "GPU u0 lacks 3 MiB"
    ground.prepare(NEED, FAILED)
    assert set(ids(vault)) == {"mine", "other", "second"}


def test_no_vault_is_no_error(ground: Ground) -> None:
    ground.prepare(NEED, FAILED)


def row(
    name: str, gpu: str = "u0", size: int = 10, held: bool = False, **key: str
) -> dict[str, Any]:
    return {
        **{"id": name, "model": "m", "bytes": size, "holders": [1] * held},
        "key": {**KEY, "tag": name, "device": f"cuda:{gpu}", **key},
    }


def test_what_a_loader_could_do_without() -> None:
    rows = [row("mine"), row("other"), row("third", size=5), row("second", "u1")]
    rows += [row("held", held=True), row("draft", content="of a draft")]
    mine = [dict(rows[0]["key"])]

    def find(free: int, needed: int, mapped: Any = mine) -> list[str]:
        found = find_spare(rows, mapped, ["of a draft"], "cuda:u0", free, needed)
        return [str(item["id"]) for item in found]

    assert find(20, 20) == []
    assert find(20, 21) == find(20, 35) == ["other", "third"]
    assert find(20, 36) == []  # somebody else has the memory
    assert find(20, 45, []) == ["mine", "other", "third"]


def test_an_earlier_checkpoint_is_superseded() -> None:
    rows = [row("a", tag="x", content="then"), row("b", tag="x"), row("c", content="then")]
    rows += [row("d", tag="draft", content="then"), row("e", tag="x", content="then", held=True)]
    new = [{**KEY, "tag": tag, "device": "cuda:u0"} for tag in ("x", "draft")]
    found = find_superseded(rows, [("m", key) for key in new])
    assert [item["id"] for item in found] == ["a", "d"]
    assert find_superseded(rows, [("another", new[0])]) == []
