# SPDX-License-Identifier: Apache-2.0
"""Artifacts that upstream's `vllm snapshot` made: found, listed and removed, never written.

They lie in a folder of their own beside ours. Everywhere but in that folder such a name has the
label `vllm:` before it, which no name of ours can have. One without a manifest is half made:
upstream writes that last. Source: vLLM 0.33's snapshot/{manifest,runtime}.py.
"""

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from . import artifact
from .artifact import Listed, list_names
from .errors import SnapshotError

FOLDER, LABEL, CHILD_LOG = "upstream-snapshots", "vllm:", "child.log"
_MANIFEST = "manifest.json"


class UpstreamManifest(msgspec.Struct, frozen=True):
    """Of upstream's manifest what is used here: PIDs with the root's first, size in bytes, and the
    words of `vllm serve` that its engine was started with."""

    created_at: str
    artifact_bytes: int
    process_tree: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]
    engine_argv: tuple[str, ...]


def is_upstreams(name: str) -> bool:
    """Given a name, tell whether it is one of upstream's artifacts."""
    return name.startswith(LABEL)


def find_folder(snapshots: Path) -> Path:
    """Given the folder of our artifacts, return that of upstream's."""
    return snapshots.with_name(FOLDER)


def find_artifact(folder: Path, name: str) -> Path:
    """Given upstream's folder and a name with its label, return where that artifact lies; raise
    SnapshotError `snapshot.name` for one that is none."""
    return artifact.find_artifact(folder, name.removeprefix(LABEL))


def read_manifest(folder: Path, name: str) -> UpstreamManifest:
    """Given upstream's folder and a name with its label, return the manifest; raise SnapshotError
    `snapshot.absent` or `snapshot.damaged`."""
    try:
        return msgspec.json.decode(_read(folder, name), type=UpstreamManifest)
    except msgspec.DecodeError as error:
        detail = f"{name} has no manifest that can be read: {error}"
        raise SnapshotError("snapshot.damaged", detail, "create a new snapshot") from error


def inspect_upstream(folder: Path, name: str) -> str:
    """Given upstream's folder and a name with its label, return the whole manifest as JSON text;
    raise SnapshotError as `read_manifest` does."""
    read_manifest(folder, name)
    return msgspec.json.format(_read(folder, name), indent=2).decode()


def list_upstream(folder: Path) -> list[Listed]:
    """Given upstream's folder, return every artifact in it, the newest first."""
    rows = []
    for name in list_names(folder) if folder.is_dir() else ():
        try:
            manifest = read_manifest(folder, LABEL + name)
        except SnapshotError as error:
            if error.code == "snapshot.damaged":
                rows.append(Listed(LABEL + name, "damaged", error.detail))
            continue
        size = manifest.artifact_bytes
        rows.append(Listed(LABEL + name, "usable", "", manifest.created_at, size))
    return sorted(rows, key=lambda row: row.created, reverse=True)


def prune_upstream(folder: Path, keep: int) -> list[str]:
    """Given upstream's folder, keep the newest `keep` artifacts that are usable; return the names
    of the removed. One that is being restored is left."""
    rows = list_upstream(folder)
    kept = [row.name for row in rows if row.state == "usable"][:keep]
    return remove_upstream(folder, [row.name for row in rows if row.name not in kept])


def sweep_upstream(folder: Path) -> list[str]:
    """Given upstream's folder, remove what has no manifest, and what else a killed maker left;
    return the names of it. For when none is being made."""
    listed = {row.name for row in list_upstream(folder)}
    names = {LABEL + name for name in list_names(folder)}
    return [*artifact.sweep(folder), *remove_upstream(folder, names - listed)]


def remove_upstream(folder: Path, names: Collection[str]) -> list[str]:
    """Given upstream's folder and names, remove these artifacts; return those that could be."""
    removed = []
    for name in names:
        with suppress(OSError, SnapshotError):
            artifact.remove(find_artifact(folder, name))
            removed.append(name)
    return removed


def _read(folder: Path, name: str) -> bytes:
    try:
        return (find_artifact(folder, name) / _MANIFEST).read_bytes()
    except OSError as error:
        detail = f"no snapshot {name}: {error.strerror}"
        raise SnapshotError("snapshot.absent", detail, "see `snapshot list`") from error
