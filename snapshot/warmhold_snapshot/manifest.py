# SPDX-License-Identifier: Apache-2.0
"""What an artifact says of itself: everything a restore needs, sealed against any change.

The file holds the manifest and an HMAC of its exact bytes under the key of the state volume. Since
the manifest holds a checksum of every image file, the seal covers the artifact: root's memory
image is not restored from files that somebody else wrote.
"""

import hmac
from typing import Any

import msgspec

from .errors import SnapshotError
from .identity import digest
from .pids import Process, collect_ids
from .scan import OpenFile
from .shm import ShmFile

FORMAT = 1


class ImageFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the artifact: its name relative to it, its bytes, and its checksum."""

    name: str
    size_bytes: int
    checksum: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An artifact. `stdio` are the inodes of the pipes that stdout and stderr went to, `listeners`
    (address, port) of TCP, `open_files` what must be there with the same size; `weights` are the
    flat files that it refers to, id to bytes; `cuda` are the PIDs that use a GPU, None where that
    was not looked at; `canary` and `notes` are the caller's; times in
    seconds, `created` in UTC."""

    format: int
    name: str
    created: str
    identity: dict[str, str]
    processes: tuple[Process, ...]
    stdio: tuple[int, ...]
    listeners: tuple[tuple[str, int], ...]
    open_files: tuple[OpenFile, ...]
    counts: dict[str, int]
    shm: tuple[ShmFile, ...]
    files: tuple[ImageFile, ...]
    bytes_by_kind: dict[str, int]
    bytes_by_process: dict[int, int]
    timings: dict[str, float]
    canary: Any = None
    notes: dict[str, str] = {}
    weights: dict[str, int] = {}
    cuda: tuple[int, ...] | None = None

    @property
    def root_pid(self) -> int:
        """The PID that the tree's first process gets back."""
        return self.processes[0].pid

    @property
    def image_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.size_bytes for file in self.files)

    def ids(self) -> set[int]:
        """Every process, thread, group and session number that a restore needs."""
        return collect_ids(self.processes)


class _Sealed(msgspec.Struct, forbid_unknown_fields=True):
    seal: str
    manifest: msgspec.Raw


def encode(manifest: Manifest, key: bytes) -> bytes:
    """Given a manifest and the key, return the bytes of its file."""
    body = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    seal = digest(key, body.decode())
    return b'{"seal": "' + seal.encode() + b'", "manifest": ' + body + b"}\n"


def decode(data: bytes, key: bytes) -> Manifest:
    """Given a file's bytes and the key, return the manifest.

    Raise SnapshotError `snapshot.damaged` where it was changed, cut, made under another key or by
    another version.
    """
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
        body = bytes(sealed.manifest)
        if not hmac.compare_digest(digest(key, body.decode()), sealed.seal):
            raise _damaged("its seal does not fit: it was changed, or made under another key")
        manifest = msgspec.json.decode(body, type=Manifest)
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise _damaged(str(error)) from error
    if manifest.format != FORMAT or not manifest.processes:
        raise _damaged(f"its format is {manifest.format}, not {FORMAT}")
    return manifest


def _damaged(detail: str) -> SnapshotError:
    return SnapshotError("snapshot.damaged", f"the manifest: {detail}", "create a new snapshot")
