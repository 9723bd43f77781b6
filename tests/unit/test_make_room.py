# SPDX-License-Identifier: Apache-2.0
"""Which resident weights make room on a GPU for an engine that does not map them: those in a real
vault, before a start by a plan."""

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
from warmhold_wcache.client import VaultClient

IPC, DISK = (Attempt(mode, ("vllm",)) for mode in ("ipc_cache", "disk"))
FAILED = weights.did_not_serve("it ended")
MINE = {"argument.dtype": "half", "content": "now"}
BYTES = 3 * SIZE  # of each generation
GIB = 1 << 30


def need_of(spare_bytes: int) -> Need:
    """An engine asks for 60 GiB of a GPU that has room for so many bytes more, beside what the
    context of CUDA takes."""
    return Need({"u0": 60 * GIB}, sizes={"u0": 61 * GIB + spare_bytes})


@pytest.fixture
def vault(tmp_path: Path) -> Iterator[Path]:
    """The socket of a vault with weights: the wanted ones, those of an earlier checkpoint, and
    another type's."""
    keys = {"mine": MINE, "earlier": {**MINE, "content": "then"}, "other": {"content": "now"}}
    with running_vault(tmp_path) as (path, _):
        (tmp_path / VAULT_SOCKET).symlink_to(path)
        with VaultClient(path) as client:
            for name, key in keys.items():
                generation, fds = make_generation(name)
                client.publish(dataclasses.replace(generation, launch_key=key), fds)
                client.release(generation.id)
                close_all(fds)
        yield path


class Ground:
    """Prepares attempts; `waited` has the needs that were waited for, `missing` what was said."""

    def __init__(self, folder: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.loop = folder, loop
        self.waited: list[Need] = []
        self.missing = ""
        monkeypatch.setattr(groundwork, "wait_for_memory", self._wait)

    def _wait(self, need: Need, *_: object) -> str:
        self.waited.append(need)
        return self.missing

    def prepare(
        self, attempt: Attempt, need: Need, *rejections: Rejection, mode: str = "auto"
    ) -> list[int]:
        """Return the bytes that were waited for."""
        environ = {"WARMHOLD_RUN_DIR": str(self.folder), "WARMHOLD_MODE": mode}
        plan = Plan(
            *((), rejections, (), {}, "m", "/m", "/c", None, 1, None, {}, Snapshots()),
            launch_key=MINE,
            memory=need,
        )
        assert Groundwork(self.loop).prepare(read_settings(environ, ())[0], plan, attempt) is None
        waited, self.waited = self.waited, []
        return [size for need in waited for size in need.by_uuid.values()]


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    loop = Loop()
    yield Ground(tmp_path, loop, monkeypatch)
    loop.close()


def resident(vault: Path) -> set[str]:
    with VaultClient(vault) as client:
        return {row["key"]["model"] for row in client.stat()}


ALL = {"mine", "earlier", "other"}


def test_what_fits_stays(vault: Path, ground: Ground) -> None:
    assert ground.prepare(IPC, need_of(BYTES)) == [60 * GIB - 2 * BYTES]
    assert resident(vault) == ALL


def test_others_make_room(vault: Path, ground: Ground) -> None:
    """Those of an earlier checkpoint are the loader's to give up: it may find them unchanged."""
    assert ground.prepare(IPC, need_of(BYTES - 1)) == [60 * GIB - 2 * BYTES]
    assert resident(vault) == {"mine", "earlier"}


@pytest.mark.parametrize("rejections", [(), (dataclasses.replace(FAILED, code="ipc_cache.hung"),)])
def test_a_start_from_disk_may_still_find_its_own(
    vault: Path, ground: Ground, rejections: Any
) -> None:
    ground.prepare(DISK, need_of(0), *rejections)
    assert resident(vault) == {"mine", "earlier"}


def test_a_start_that_will_map_none_makes_room_of_all(vault: Path, ground: Ground) -> None:
    assert ground.prepare(DISK, need_of(3 * BYTES), mode="disk") == [60 * GIB]
    assert resident(vault) == ALL
    assert ground.prepare(DISK, need_of(3 * BYTES - 1), mode="disk") == [60 * GIB]
    assert resident(vault) == set()


def test_weights_that_an_engine_did_not_come_up_on_go(vault: Path, ground: Ground) -> None:
    assert ground.prepare(DISK, need_of(BYTES), FAILED) == [60 * GIB - 2 * BYTES, 60 * GIB]
    assert resident(vault) == {"other"}


def test_on_a_cpu_too(vault: Path, ground: Ground) -> None:
    assert ground.prepare(DISK, Need({}), FAILED) == []
    assert resident(vault) == {"other"}


def test_they_stay_where_others_have_the_memory(vault: Path, ground: Ground) -> None:
    """What it failed for is not they."""
    ground.missing = "GPU u0 lacks 3 MiB"
    assert ground.prepare(DISK, need_of(BYTES), FAILED) == [60 * GIB - 2 * BYTES]
    assert resident(vault) == ALL


def test_what_a_process_uses_stays(vault: Path, ground: Ground) -> None:
    with VaultClient(vault) as client:
        generation, fds = client.fetch({"model": "mine", "dtype": "float32"})
        close_all(fds)
        ground.prepare(DISK, need_of(0), FAILED)
        assert resident(vault) == {"mine"}
        client.release(generation.id)


def test_no_vault_is_no_error(ground: Ground) -> None:
    assert ground.prepare(DISK, need_of(0), FAILED) == [60 * GIB, 60 * GIB]
