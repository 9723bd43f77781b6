# SPDX-License-Identifier: Apache-2.0
"""Flat files: weights that snapshots need and that a new container's vault does not hold.

    <folder>/<id>    the generation's segments, a header (JSON), the header's length and its seal

There is one for each generation, shared by all artifacts. The header comes last because checksums
are known last; under its seal they cover every byte. What a description says is the caller's
business, and so is where segments come from and go to.
"""

import hmac
import os
import re
import secrets
import struct
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import msgspec

from .checksum import Part, Place, Progress, checksum_parts
from .errors import SnapshotError
from .folder import sync
from .identity import digest

FORMAT = 1
_ID = re.compile(r"[0-9a-f]{16}")
_DRAFT = ".tmp-"
_TAIL = struct.Struct(">Q64s")
_MAX_HEADER_BYTES = 64 << 20
_AGAIN = "none: another mode loads them; `snapshot create` writes the file anew"


@dataclass(frozen=True)
class Weights:
    """A generation at hand: its id, the vault's description of it (JSON), and each segment as place
    and bytes. Descriptors and memory are the caller's."""

    id: str
    description: bytes
    segments: tuple[tuple[Place, int], ...]

    @property
    def size_bytes(self) -> int:
        """The bytes of all segments."""
        return sum(size for _, size in self.segments)


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a flat file says of itself; each segment as bytes and checksum."""

    format: int
    id: str
    description: msgspec.Raw
    segments: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Flat:
    """An open flat file."""

    handle: int
    header: Header

    def copy(self, targets: Sequence[Place] = (), progress: Progress | None = None) -> None:
        """Given a place for each segment, or none, verify every byte and write it there.

        Raise SnapshotError `snapshot.weights-damaged`, with all written, and OSError.
        """
        sizes = [size for size, _ in self.header.segments]
        nowhere: list[Place] = [-1] * len(sizes)
        places = zip(_starts(sizes), sizes, targets or nowhere, strict=True)
        found = checksum_parts([Part(self.handle, *place) for place in places], progress=progress)
        wanted = [checksum for _, checksum in self.header.segments]
        if found != wanted:
            wrong = [str(index) for index, value in enumerate(found) if value != wanted[index]]
            detail = f"segment(s) {', '.join(wrong[:5])} have other bytes ({len(wrong)} in all)"
            raise _damaged(self.header.id, detail)


class FlatFiles:
    """The folder of all flat files, which is made with the first one, and the key that seals them.
    Who writes or sweeps holds the lock on the folder above."""

    def __init__(self, folder: Path, key: bytes) -> None:
        self.folder = folder
        self._key = key

    @contextmanager
    def open(self, generation_id: str) -> Iterator[Flat]:
        """Given a generation's id, open its flat file, with header and size as they were written.

        Raise SnapshotError `snapshot.weights-absent` or `snapshot.weights-damaged`.
        """
        try:
            handle = os.open(self._path(generation_id), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            detail = f"{generation_id} is in no flat file: {error.strerror}"
            raise SnapshotError("snapshot.weights-absent", detail, _AGAIN) from error
        try:
            yield Flat(handle, self._read_header(handle, generation_id))
        finally:
            os.close(handle)

    def verify(self, generation_id: str, checksums: bool = False) -> None:
        """Given an id, compare header and size, and bytes if asked; raise as `open` does."""
        with self.open(generation_id) as flat:
            try:
                if checksums:
                    flat.copy()
            except OSError as error:
                raise _damaged(generation_id, f"it cannot be read: {error}") from error

    def holds(self, weights: Weights) -> bool:
        """Given weights, tell whether their flat file is there; its bytes are not read."""
        try:
            with self.open(weights.id) as flat:
                return bytes(flat.header.description) == weights.description
        except SnapshotError:
            return False

    def write(self, weights: Weights) -> None:
        """Given weights, bring their flat file to the disk, unless it is there.

        Raise SnapshotError `snapshot.disk`, and what their memory raises; nothing of it is left.
        """
        if self.holds(weights):
            return
        place = self._path(weights.id)
        draft = self.folder / f"{_DRAFT}{weights.id}-{secrets.token_hex(4)}"
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(draft, flags, 0o600), "wb") as file:
                sizes = [size for _, size in weights.segments]
                places = zip(weights.segments, _starts(sizes), strict=True)
                checksums = checksum_parts(
                    [Part(at, 0, size, file.fileno(), start) for (at, size), start in places]
                )
                file.seek(weights.size_bytes)
                file.write(self._encode(weights, tuple(zip(sizes, checksums, strict=True))))
                file.flush()
                os.fsync(file.fileno())
            draft.rename(place)
            sync(self.folder)
        except OSError as error:
            detail = f"{place} cannot be written: {error.strerror or error}"
            remedy = "see `snapshot check`, or set WARMHOLD_SNAPSHOT_WEIGHTS=none"
            raise SnapshotError("snapshot.disk", detail, remedy) from error
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)

    def remove(self, generation_id: str) -> None:
        """Given an id, remove its flat file; who reads it goes on."""
        self._path(generation_id).unlink(missing_ok=True)

    def sweep(self, kept: Collection[str]) -> None:
        """Remove all but these ids, and what killed makers left."""
        with suppress(FileNotFoundError):
            for path in self.folder.iterdir():
                if path.name not in kept:
                    path.unlink()

    def _path(self, generation_id: str) -> Path:
        # An engine said so, and engines are not trusted: it must not lead elsewhere.
        if not _ID.fullmatch(generation_id):
            detail = f"{generation_id!r} is no id of a generation"
            raise SnapshotError("snapshot.weights-absent", detail, _AGAIN)
        return self.folder / generation_id

    def _encode(self, weights: Weights, segments: tuple[tuple[int, str], ...]) -> bytes:
        header = Header(FORMAT, weights.id, msgspec.Raw(weights.description), segments)
        body = msgspec.json.encode(header)
        return body + _TAIL.pack(len(body), digest(self._key, body.decode()).encode())

    def _read_header(self, handle: int, generation_id: str) -> Header:
        size = os.fstat(handle).st_size
        try:
            length, seal = _TAIL.unpack(os.pread(handle, _TAIL.size, max(0, size - _TAIL.size)))
            end = size - _TAIL.size
            if length > min(_MAX_HEADER_BYTES, end):
                raise ValueError("it was cut")
            body = os.pread(handle, length, end - length)
            if not hmac.compare_digest(digest(self._key, body.decode()).encode(), seal):
                raise ValueError("its seal does not fit: it was changed, or made under another key")
            header = msgspec.json.decode(body, type=Header)
        except (OSError, struct.error, msgspec.MsgspecError, ValueError) as error:
            raise _damaged(generation_id, str(error)) from error
        if (header.format, header.id) != (FORMAT, generation_id):
            detail = f"it is of {header.id}, format {header.format}"
            raise _damaged(generation_id, detail)
        if sum(size for size, _ in header.segments) != end - length:
            raise _damaged(generation_id, "its size does not fit")
        return header


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where each segment begins in the file."""
    return list(accumulate(sizes, initial=0))[:-1]


def _damaged(generation_id: str, detail: str) -> SnapshotError:
    detail = f"the flat file of {generation_id}: {detail}"
    return SnapshotError("snapshot.weights-damaged", detail, _AGAIN)
