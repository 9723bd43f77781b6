# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that changed: its old generation goes, and nothing else does."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from stack import ROOT
from vault_process import Loop, close_all, make_generation, open_fds, running_vault
from warmhold_entrypoint.container.fdstore import FdStore
from warmhold_wcache.client import VaultClient
from warmhold_wcache.errors import WcacheError
from warmhold_wcache.store import FdStoreClient

KEY = {
    "content": "old",
    "checkpoint": "sizes",
    "hf_config_hash": "config",
    "revision": "null",
    "tp_rank": "0",
    "tp_size": "2",
    "dtype": "torch.bfloat16",
    "cpu_linear": "shared-plain",
    "is_draft": "false",
}


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = open_fds()
    yield
    assert open_fds() == before


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """An fd store as PID 1 serves it."""
    made = FdStore(tmp_path / "fdstore.sock", os.getuid())
    with Loop(made):
        yield tmp_path / "fdstore.sock"
    made.close()


def publish(client: VaultClient, model: str = "/models/a", held: bool = False, **key: str) -> str:
    generation, fds = make_generation()
    generation = dataclasses.replace(generation, key={**KEY, **key}, model=model)
    client.publish(generation, fds)
    close_all(fds)
    if not held:
        client.release(generation.id)
    return generation.id


def resident(client: VaultClient) -> set[str]:
    return {row["id"] for row in client.stat()}


def test_another_content_takes_the_place_of_the_old_one(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with running_vault(tmp_path, store, log_level="info") as (path, _), VaultClient(path) as client:
        old = publish(client)
        new = publish(client, content="new", checkpoint="other", hf_config_hash="other")
        assert resident(client) == {new}
        client.release(new)
        assert [entry.name for entry in FdStoreClient(store).entries()] == [f"generation.{new}"]
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "superseded" in line]
    assert line.endswith(f"superseded generation dropped id={old} by={new} bytes=12288")


@pytest.mark.parametrize("changed", ["content", "checkpoint", "hf_config_hash", "revision"])
def test_only_another_content_supersedes(tmp_path: Path, changed: str) -> None:
    """With equal weight files, another configuration is a choice: both are served from one
    checkpoint."""
    with running_vault(tmp_path) as (path, _), VaultClient(path) as client:
        old, new = publish(client), publish(client, **{changed: "new"})
        assert resident(client) == ({new} if changed == "content" else {old, new})


@pytest.mark.parametrize(
    "other",
    [
        {"tp_rank": "1"},
        {"cpu_linear": "packed"},
        {"dtype": "torch.float16"},
        {"is_draft": "true"},
        {"vllm_version": "9"},  # a field that the old key lacks
        {"model": "/models/b"},
        {"content": ""},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_someone_else_may_want_stays(tmp_path: Path, other: dict[str, str]) -> None:
    with running_vault(tmp_path) as (path, _), VaultClient(path) as client:
        ids = {publish(client), publish(client, **{"content": "new", **other})}
        assert resident(client) == ids
        assert len(ids) == 2


def test_each_rank_supersedes_its_own(tmp_path: Path) -> None:
    with running_vault(tmp_path) as (path, _), VaultClient(path) as client:
        _, old = (publish(client, tp_rank=rank) for rank in "01")
        first = publish(client, tp_rank="0", content="new")
        assert resident(client) == {first, old}
        second = publish(client, tp_rank="1", content="new")
        assert resident(client) == {first, second}


HOLDER = """
import sys
from pathlib import Path
from warmhold_wcache.client import VaultClient
with VaultClient(Path(sys.argv[1])) as client:
    client.lease(sys.argv[2])
print("held", flush=True)
sys.stdin.read()
"""


def test_what_is_held_stays_until_the_next(tmp_path: Path, store: Path) -> None:
    with running_vault(tmp_path, store) as (path, _), VaultClient(path) as client:
        old = publish(client)
        with subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(path), old],
            env={"PYTHONPATH": str(ROOT / "wcache"), "PATH": os.environ["PATH"]},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            second = publish(client, content="second")
            assert resident(client) == {old, second}
        # Its lease is over now, whether or not the vault has heard of it.
        third = publish(client, content="third")
        assert resident(client) == {third}


def test_a_store_that_does_not_answer_does_not_undo_a_publish(tmp_path: Path) -> None:
    class Store:
        def put(self, name: str, fds: object) -> None: ...
        def drop(self, name: str) -> None:
            if name.startswith("generation."):
                raise WcacheError("wcache.hung", "no answer")

    with running_vault(tmp_path) as (path, vault), VaultClient(path) as client:
        vault._store = Store()  # type: ignore[assignment]
        assert resident(client) == set()
        ids = {publish(client), publish(client, content="new")}
        assert resident(client) == ids
