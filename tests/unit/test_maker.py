# SPDX-License-Identifier: Apache-2.0
"""What the maker of a snapshot passes on, for an engine on the CPU and on a GPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from warmhold_entrypoint.snapshot_mode import maker
from warmhold_entrypoint.snapshot_mode.flat_weights import write_flat
from warmhold_entrypoint.snapshot_mode.snapshots import GENERATIONS
from warmhold_snapshot.create import Report
from warmhold_snapshot.errors import SnapshotError

ID = "0123456789abcdef"


class Engine:
    mapped: tuple[str, ...] = (ID,)

    def generations(self) -> dict[str, int]:
        return dict.fromkeys(self.mapped, 4096)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `create` was given, and which flat weights were asked for."""
    seen: dict[str, Any] = {}

    @contextmanager
    def open_weights(vault: Path, kept: Sequence[str]) -> Iterator[list[str]]:
        seen["flat"] = list(kept)
        yield list(kept)

    def create(*given: Any, **named: Any) -> Report:
        seen.update(named)
        return Report(given[2].folder / "one", 1.0, 0.5, 7, 0, {}, {}, {})

    monkeypatch.setattr(maker, "open_weights", open_weights)
    monkeypatch.setattr(maker, "create", create)
    return seen


def request(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return {
        **{"pid": 1, "name": "one", "folder": str(tmp_path / "snapshots"), "identity": {}},
        **{"vault": "v", "weights": "flat", "plugins": "", "other_uid": False, "prune": ""},
        "compress": False,
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "plugins", "flat"),
    [
        ({}, None, [ID]),
        ({"weights": "none"}, None, []),
        ({"plugins": "/plug"}, Path("/plug"), [ID]),
        ({"plugins": "/plug", "weights": "none"}, Path("/plug"), []),
    ],
)
def test_flat_weights_and_plugins(
    tmp_path: Path,
    seen: dict[str, Any],
    changes: dict[str, Any],
    plugins: Path | None,
    flat: list[str],
) -> None:
    result = maker.make(request(tmp_path, **changes), Engine())  # type: ignore[arg-type]
    assert result["ok"] and result["name"] == "one"
    assert (seen["plugins"], seen["flat"]) == (plugins, flat)
    assert seen["notes"] == {GENERATIONS: ID}
    assert (seen["write"].func, seen["write"].args) == (write_flat, (Path("v"),))


def test_weights_that_the_gpu_alone_has(tmp_path: Path, seen: dict[str, Any]) -> None:
    """On a CPU they are a part of the process, which is saved as it is."""
    engine: Any = Engine()
    engine.mapped = ()
    with pytest.raises(SnapshotError) as caught:
        maker.make(request(tmp_path, plugins="/plug"), engine)
    assert caught.value.code == "snapshot.detached" and "plugins" not in seen
    assert maker.make(request(tmp_path), engine)["ok"]
    assert seen["notes"] == {GENERATIONS: ""}
