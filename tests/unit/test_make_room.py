# SPDX-License-Identifier: Apache-2.0
"""Which resident weights make room on a GPU for an engine that does not map them: those in a real
vault, before a start by a plan."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vault_process import close_all, make_generation, running_vault
from warmhold_entrypoint.container.conf import VAULT_SOCKET
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
# A GPU of 100: the engine asks for 60, of which its weights are 20; 30 are another's.
NEED = Need({"u0": 40}, others_bytes=30, mapped_bytes=20, sizes={"u0": 100})
FAILED = weights.did_not_serve("it ended")


@pytest.fixture
def vault(tmp_path: Path) -> Iterator[Path]:
    """The socket of a vault with the weights `mine` and `other`."""
    with running_vault(tmp_path) as (path, _):
        (tmp_path / VAULT_SOCKET).symlink_to(path)
        with VaultClient(path) as client:
            for name in ("mine", "other"):
                generation, fds = make_generation(name)
                client.publish(generation, fds)
                client.release(generation.id)
                close_all(fds)
        yield path


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Prepare an attempt of a plan with a need; the need that was waited for."""
    waited: list[Need] = []
    monkeypatch.setattr(groundwork, "wait_for_memory", lambda need, *_: waited.append(need) or "")
    settings = read_settings({"WARMHOLD_RUN_DIR": str(tmp_path)}, ())[0]
    loop = Loop()

    def act(attempt: Attempt, need: Need = NEED, *rejections: Any) -> Need:
        plan = Plan(
            *((), rejections, (), {}, "m", "/m", "/c", None, 1, None, {}, Snapshots()),
            launch_key={"argv": "mine"},
            memory=need,
        )
        assert Groundwork(loop).prepare(settings, plan, attempt) is None
        return waited.pop()

    yield act
    loop.close()


def resident(vault: Path) -> set[str]:
    with VaultClient(vault) as client:
        return {row["launch_key"]["argv"] for row in client.stat()}


def test_what_fits_stays(vault: Path, prepare: Any) -> None:
    assert prepare(IPC) == NEED
    assert resident(vault) == {"mine", "other"}


def test_others_make_room(vault: Path, prepare: Any) -> None:
    need = dataclasses.replace(NEED, others_bytes=41)
    assert prepare(IPC, need) == dataclasses.replace(need, others_bytes=0)
    assert resident(vault) == {"mine"}


@pytest.mark.parametrize("rejections", [(), (dataclasses.replace(FAILED, code="ipc_cache.hung"),)])
def test_a_start_from_disk_may_still_find_its_own(
    vault: Path, prepare: Any, rejections: Any
) -> None:
    need = dataclasses.replace(NEED, others_bytes=41)
    assert prepare(DISK, need, *rejections).by_uuid == {"u0": 40}
    assert resident(vault) == {"mine"}


def test_weights_that_an_engine_did_not_come_up_on_go(vault: Path, prepare: Any) -> None:
    assert prepare(DISK, NEED, FAILED).by_uuid == {"u0": 60}
    assert resident(vault) == {"other"}


def test_on_a_cpu_too(vault: Path, prepare: Any) -> None:
    prepare(DISK, Need({}, others_bytes=30, mapped_bytes=20), FAILED)
    assert resident(vault) == {"other"}


def test_what_a_process_uses_stays(vault: Path, prepare: Any) -> None:
    with VaultClient(vault) as client:
        generation, fds = client.fetch({"model": "mine", "dtype": "float32"})
        close_all(fds)
        prepare(DISK, dataclasses.replace(NEED, others_bytes=41), FAILED)
        assert resident(vault) == {"mine"}
        client.release(generation.id)


def test_no_vault_is_no_error(prepare: Any) -> None:
    assert prepare(DISK, NEED, FAILED).by_uuid == {"u0": 60}
