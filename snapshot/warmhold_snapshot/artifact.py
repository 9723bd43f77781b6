# SPDX-License-Identifier: Apache-2.0
"""Artifacts on disk: `<folder>/<name>/`, seen whole or not at all.

    manifest.json   written last, sealed
    images/         what criu wrote
    shm.img         what lay in /dev/shm
    dump.log        criu's log
    failed.json     why a restore failed, if one did

Flat files of weights lie in `<folder>/.weights/` and go with the last artifact that refers to them.

An artifact is made in `.tmp-*` beside its place and put there by one rename, or one exchange with
its predecessor. Whoever makes or uses one holds a lock on its folder, so that what a killed maker
left is known from what is being made, and nothing in use is removed.
"""

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .checksum import Progress, compute_checksums
from .errors import SnapshotError
from .flat import FlatFiles
from .folder import ALONE, TOGETHER, exchange, locked, sync
from .frozen import PACK
from .identity import read_key
from .manifest import ImageFile, Manifest, decode, encode
from .mark import read_mark

IMAGES, MANIFEST, KEY, WEIGHTS = "images", "manifest.json", ".key", ".weights"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
DRAFT = ".tmp-"
_RECREATE = "create a new snapshot"
_IN_USE = "the snapshot is being made, restored or removed"


@dataclass(frozen=True)
class Listed:
    """An artifact in a list: `state` is usable, failed or damaged, `detail` says why; `weights` is
    flat, absent (a file has gone), damaged or none, and `weights_bytes` are those of the files."""

    name: str
    state: str
    detail: str = ""
    created: str = ""
    image_bytes: int = 0
    weights: str = "none"
    weights_bytes: int = 0


@dataclass(frozen=True)
class Draft:
    """An artifact in the making, and the lock that keeps it from being swept, as a descriptor."""

    folder: Path
    lock_fd: int


class Store:
    """The folder of all artifacts, and the key that seals them."""

    def __init__(self, folder: Path, key_path: Path | None = None) -> None:
        """Given the folder (made where there is none) and the key file, open it."""
        self.folder = folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            detail = f"{folder} cannot be made: {error.strerror}"
            raise SnapshotError("snapshot.disk", detail, "mount a writable state volume") from error
        self.key = read_key(key_path or folder / KEY)
        self.flat = FlatFiles(folder / WEIGHTS, self.key)

    def path(self, name: str) -> Path:
        """Given a name, return the artifact's folder; raise SnapshotError for one that is none."""
        return find_artifact(self.folder, name)

    def names(self) -> list[str]:
        """Return the names of all artifacts; what is half made has none."""
        return list_names(self.folder)

    def read(self, name: str) -> Manifest:
        """Given a name, return the manifest; raise SnapshotError `snapshot.absent` or
        `snapshot.damaged`."""
        folder = self.path(name)
        if not folder.is_dir():
            raise SnapshotError("snapshot.absent", f"no snapshot {name}", "see `snapshot list`")
        try:
            handle = os.open(folder / MANIFEST, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(handle, "rb") as file:
                manifest = decode(file.read(), self.key)
        except OSError as error:
            detail = f"{name} has no manifest that can be read: {error.strerror}"
            raise SnapshotError("snapshot.damaged", detail, _RECREATE) from error
        if manifest.name != name:
            detail = f"{name} has the manifest of {manifest.name}"
            raise SnapshotError("snapshot.damaged", detail, _RECREATE)
        return manifest

    def rows(self) -> list[Listed]:
        """Return every artifact, the newest first."""
        rows = [self._listed(name) for name in self.names()]
        return sorted(rows, key=lambda row: row.created, reverse=True)

    def verify(
        self,
        manifest: Manifest,
        checksums: bool = True,
        progress: Progress | None = None,
        among: Callable[[str], bool] | None = None,
    ) -> None:
        """Given a manifest, compare every file with it: names and sizes, and bytes if asked, of
        all files or of those `among` them.

        Raise SnapshotError `snapshot.damaged` with every file that is not as it was.
        """
        folder = self.path(manifest.name)
        wanted = {file.name: file for file in manifest.files}
        try:
            sizes = _read_sizes(folder)
        except OSError as error:  # removed meanwhile
            detail = f"{manifest.name}: its files cannot be listed: {error}"
            raise SnapshotError("snapshot.damaged", detail, _RECREATE) from error
        wrong = [f"{name} is missing" for name in wanted.keys() - sizes.keys()]
        wrong += [f"{name} is not its own" for name in sizes.keys() - wanted.keys()]
        wrong += [
            f"{name} has {sizes[name]} bytes, not {wanted[name].size_bytes}"
            for name in wanted.keys() & sizes.keys()
            if sizes[name] != wanted[name].size_bytes
        ]
        if not wrong and checksums:
            try:
                meant = sorted(name for name in wanted if among is None or among(name))
                found = compute_checksums(folder, meant, progress=progress)
            except OSError as error:
                wrong = [f"cannot be read: {error}"]
            else:
                wrong = [
                    f"{name} has other bytes"
                    for name in meant
                    if found[name] != (wanted[name].size_bytes, wanted[name].checksum)
                ]
        if wrong:
            detail = f"{manifest.name}: {'; '.join(sorted(wrong))}"
            raise SnapshotError("snapshot.damaged", detail, _RECREATE, sorted(wrong))

    def judge_weights(self, manifest: Manifest) -> str:
        """Given a manifest, return what its flat files are: flat, absent, damaged, or none where it
        refers to none. Their bytes are not read."""
        try:
            for generation_id in manifest.weights:
                self.flat.verify(generation_id)
        except SnapshotError as error:
            return error.code.removeprefix("snapshot.weights-")
        return "flat" if manifest.weights else "none"

    @contextmanager
    def draft(self, name: str) -> Iterator[Draft]:
        """Given a name, make a temporary folder for its artifact; it is gone afterwards unless it
        was published. Raise SnapshotError `snapshot.busy` where another one is being made, and
        `snapshot.disk`."""
        self.path(name)
        with locked(self.folder, ALONE, "another snapshot is being made"):
            try:
                yield from self._draft(name)
            finally:
                self._sweep_weights()

    def _draft(self, name: str) -> Iterator[Draft]:
        self.sweep()
        folder = self.folder / f"{DRAFT}{name}-{secrets.token_hex(4)}"
        try:
            (folder / IMAGES).mkdir(mode=0o700, parents=True)
            folder.chmod(0o700)
        except OSError as error:
            detail = f"{folder} cannot be made: {error.strerror}"
            raise SnapshotError("snapshot.disk", detail, "see `snapshot check`") from error
        with locked(folder, ALONE, _IN_USE) as lock_fd:
            try:
                yield Draft(folder, lock_fd)
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def publish(self, draft: Draft, manifest: Manifest) -> Path:
        """Given a draft and its manifest, write the manifest, bring all to the disk, and put the
        artifact in its place; return that. Its predecessor is left in the draft, to be removed.
        Raise SnapshotError `snapshot.disk`, or `snapshot.busy` where the predecessor is in use."""
        place = self.path(manifest.name)
        try:
            with (draft.folder / MANIFEST).open("xb") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(encode(manifest, self.key))
            for path in (*draft.folder.rglob("*"), draft.folder):
                sync(path)
            if place.exists():
                with locked(place, ALONE, _IN_USE):  # not under a restore that reads it
                    exchange(draft.folder, place)
            else:
                draft.folder.rename(place)
            sync(self.folder)
        except OSError as error:
            detail = f"{place} cannot be written: {error.strerror}"
            raise SnapshotError("snapshot.disk", detail, "see `snapshot check`") from error
        return place

    @contextmanager
    def using(self, name: str) -> Iterator[Path]:
        """Given a name, keep its artifact from being removed meanwhile."""
        folder = self.path(name)
        if not folder.is_dir():
            raise SnapshotError("snapshot.absent", f"no snapshot {name}", "see `snapshot list`")
        with locked(folder, TOGETHER, _IN_USE):
            yield folder

    def remove(self, name: str) -> None:
        """Given a name, remove the artifact; raise SnapshotError `snapshot.busy` where it is in
        use. It has no name any more before its first file goes."""
        folder = self.path(name)
        if not folder.is_dir():
            raise SnapshotError("snapshot.absent", f"no snapshot {name}", "see `snapshot list`")
        remove(folder)
        self.sweep_weights()

    def prune(self, keep: int, prefix: str = "") -> list[str]:
        """Keep the newest `keep` artifacts that are usable, remove the rest of those whose names
        begin with the prefix; return the names of the removed. One in use is left."""
        rows = self.rows()
        kept = [row.name for row in rows if row.state == "usable"][:keep]
        removed = []
        for row in rows:
            if row.name not in kept and row.name.startswith(prefix):
                try:
                    self.remove(row.name)
                except SnapshotError as error:
                    if error.code not in ("snapshot.busy", "snapshot.absent"):
                        raise
                else:
                    removed.append(row.name)
        self.sweep()
        self.sweep_weights()
        return removed

    def sweep_weights(self) -> None:
        """Remove flat files that no artifact refers to. While one is being made they are left: its
        maker does it."""
        with suppress(SnapshotError), locked(self.folder, ALONE, _IN_USE):
            self._sweep_weights()

    def sweep(self) -> list[str]:
        """Remove what killed makers left; return the names of it."""
        return sweep(self.folder)

    def _listed(self, name: str) -> Listed:
        try:
            manifest = self.read(name)
        except SnapshotError as error:
            return Listed(name, "damaged", error.detail)
        mark = read_mark(self.path(name))
        state, detail = ("failed", f"{mark.code}: {mark.detail}") if mark else ("usable", "")
        weights, weights_bytes = self.judge_weights(manifest), sum(manifest.weights.values())
        return Listed(
            name, state, detail, manifest.created, manifest.image_bytes, weights, weights_bytes
        )

    def _sweep_weights(self) -> None:
        kept: set[str] = set()
        for name in self.names():
            with suppress(SnapshotError):  # a damaged one is never restored
                kept |= self.read(name).weights.keys()
        with suppress(OSError):
            self.flat.sweep(kept)


def find_artifact(folder: Path, name: str) -> Path:
    """Given the folder of all artifacts and a name, return its own folder; that needs no key. Raise
    SnapshotError `snapshot.name` for one that is none."""
    if not _NAME.fullmatch(name):
        remedy = "use letters, digits, dots, dashes and underscores, 64 at most"
        raise SnapshotError("snapshot.name", f"{name!r} is no name of a snapshot", remedy)
    return folder / name


def list_names(folder: Path) -> list[str]:
    """Given the folder of all artifacts, return their names; that needs no key."""
    return sorted(
        entry.name
        for entry in folder.iterdir()
        if _NAME.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink()
    )


def remove(folder: Path) -> None:
    """Given an artifact's own folder, remove it as `Store.remove` does; that needs no key. Raise
    SnapshotError `snapshot.busy`, `snapshot.absent`, or `snapshot.disk` for a read-only volume."""
    with locked(folder, ALONE, _IN_USE):
        away = folder.with_name(f"{DRAFT}{folder.name}-{secrets.token_hex(4)}")
        try:
            folder.rename(away)
        except FileNotFoundError as error:  # somebody else removed it before the lock was ours
            raise SnapshotError("snapshot.absent", f"{folder} has gone", "try again") from error
        except OSError as error:
            detail = f"{folder} cannot be removed: {error.strerror}"
            raise SnapshotError("snapshot.disk", detail, "mount a writable state volume") from error
        shutil.rmtree(away)


def sweep(folder: Path) -> list[str]:
    """Given the folder of all artifacts, remove what killed makers left; return the names of it."""
    removed = []
    for entry in folder.iterdir():
        if entry.name.startswith(DRAFT) and entry.is_dir() and not entry.is_symlink():
            try:
                with locked(entry, ALONE, _IN_USE):
                    shutil.rmtree(entry, ignore_errors=True)
            except SnapshotError:  # being made right now, or swept by somebody else
                continue
            removed.append(entry.name)
    return removed


def describe_files(folder: Path, progress: Progress | None = None) -> tuple[ImageFile, ...]:
    """Given an artifact's folder, return every file that its manifest is to hold."""
    found = compute_checksums(folder, sorted(_read_sizes(folder)), progress=progress)
    return tuple(ImageFile(name, size, checksum) for name, (size, checksum) in found.items())


def _read_sizes(folder: Path) -> dict[str, int]:
    """Sizes of the files that count, by name; what is no regular file has -1."""
    paths = [folder / PACK, *(folder / IMAGES).iterdir()] if (folder / IMAGES).is_dir() else []
    return {
        str(path.relative_to(folder)): path.lstat().st_size
        if path.is_file() and not path.is_symlink()
        else -1
        for path in paths
        if os.path.lexists(path)
    }
