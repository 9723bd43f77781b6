# SPDX-License-Identifier: Apache-2.0
"""The folders that are made before a start, and whose they are then."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from warmhold_entrypoint.start import prepare_folders

UID = 1234

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root may give folders away")


def prepare(tmp_path: Path) -> Path:
    """Prepare them for an engine with a uid of its own; return its cache."""
    cache = tmp_path / "state" / "cache" / "build"
    env = SimpleNamespace(
        run_dir=tmp_path / "run", state_dir=tmp_path / "state", models_dir=tmp_path / "models"
    )
    plan = SimpleNamespace(uid=UID, cache_dir=str(cache), model_directory=None)
    prepare_folders(SimpleNamespace(env=env), plan)  # type: ignore[arg-type]
    return cache


def test_the_engine_gets_its_own(tmp_path: Path) -> None:
    cache = prepare(tmp_path)
    own = [cache, cache / "home", tmp_path / "run" / "engine", tmp_path / "state" / "digests"]
    assert {path.stat().st_uid for path in [*own, tmp_path / "models" / "hub"]} == {UID}
    assert {path.stat().st_uid for path in (cache.parent, tmp_path / "state")} == {os.getuid()}


def test_a_link_that_the_engine_has_put_there_gives_nothing_away(tmp_path: Path) -> None:
    home, other = prepare(tmp_path) / "home", tmp_path / "etc"
    other.mkdir()
    home.rmdir()
    home.symlink_to(other)
    prepare(tmp_path)
    assert other.stat().st_uid == os.getuid()


def test_a_link_that_the_user_has_made_is_followed(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "large").mkdir()
    (tmp_path / "models" / "hub").symlink_to(tmp_path / "large")
    prepare(tmp_path)
    assert (tmp_path / "large").stat().st_uid == UID
