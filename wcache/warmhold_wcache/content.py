# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint's weight files contain: one digest per file, cached per version of the file.

A version is size, mtime, ctime and inode. ctime is what cannot be set back by a user program, so a
file that was changed and got its old mtime again counts as another version. No torch, no vLLM; the
blake3 package (a dependency of vLLM) is imported only where a file is really read.
"""

import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

_BLOCK_BYTES = 16 << 20
# A file that was written a moment ago can be written again within one tick of the clock that stamps
# ctime, so that both versions look alike: its digest is used, and not kept (git calls it racy).
_SETTLED_S = 2.0
_MAX_ENTRY_BYTES = 1 << 16
# Tried in this order, as vLLM's default loader does: the first kind that exists is the checkpoint.
_KINDS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
# What some models read besides, on their own: dense layers of sentence-transformers, Jina's
# adapters, DFlash's mask. Sources: adapters.py, jina.py, qwen3_dflash.py in vLLM's models.
_OWN_READS = (
    *("*/model.safetensors", "*/pytorch_model.bin", "adapters/*/adapter_model.safetensors"),
    "mask_embedding.pt",
)

Progress = Callable[[int, int], None]  # bytes done, bytes in all


class ContentError(Exception):
    """A weight file cannot be read, or changed while it was read."""


@dataclass(frozen=True)
class FileVersion:
    """One version of one file, as stat(2) tells it; times in nanoseconds."""

    path: str
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int


@dataclass(frozen=True)
class Content:
    """A checkpoint's identity: a digest over all weight files, and the versions it was taken of."""

    digest: str
    versions: tuple[FileVersion, ...]


def find_weight_files(folder: Path) -> tuple[Path, ...]:
    """Given a checkpoint's folder, return its weight files by name: every file of the first kind
    found, whether or not an index names it, and then those that a model may read on its own. One
    file too many costs time, one too few a wrong hit."""
    for kind in _KINDS:
        if files := sorted(folder.glob(kind)):
            more = {path for pattern in _OWN_READS for path in folder.glob(pattern)}
            return (*files, *sorted(more.difference(files)))
    return ()


def read_version(path: Path) -> FileVersion:
    """Given a path, return the version of the file there; links are followed."""
    return _version(path, path.stat())


def read_versions(folder: Path) -> tuple[FileVersion, ...]:
    """Given a checkpoint's folder, return the version of each weight file; nothing is opened."""
    return tuple(read_version(path) for path in find_weight_files(folder))


def read_cached_content(folder: Path, cache: Path | None) -> Content:
    """Given a checkpoint and the folder of kept digests, return its content without reading a
    weight file; the digest is "" unless the present version of every file is known."""
    versions = read_versions(folder)
    digests = [_read_digest(version, cache) for version in versions]
    known = [digest for digest in digests if digest is not None]
    complete = bool(versions) and len(known) == len(versions)
    return Content(_combine(versions, known) if complete else "", versions)


def compute_content(
    folder: Path, cache: Path | None, progress: Progress | None = None, threads: int | None = None
) -> Content:
    """Given a checkpoint and the folder of kept digests, return its content; files whose present
    version is not known are read, several at once. Raise ContentError if one changes meanwhile."""
    versions = read_versions(folder)
    if not versions:
        raise ContentError(f"{folder} holds no weight file")
    threads = threads or len(os.sched_getaffinity(0))
    meter = _Meter(sum(version.size_bytes for version in versions), progress)
    workers = min(threads, len(versions))
    with ThreadPoolExecutor(workers, "digest") as pool:
        digests = list(
            pool.map(
                lambda version: _digest(version, cache, meter, max(1, threads // workers)), versions
            )
        )
    return Content(_combine(versions, digests), versions)


class _Meter:
    """Adds up what several threads read and hands the sum on; a lost update only delays a line."""

    def __init__(self, total_bytes: int, progress: Progress | None) -> None:
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._progress = progress

    def add(self, count_bytes: int) -> None:
        self._done_bytes += count_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)


def _version(path: Path, stat: os.stat_result) -> FileVersion:
    return FileVersion(str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


def _combine(versions: Sequence[FileVersion], digests: Sequence[str]) -> str:
    # Names and not paths: the same files in another folder are the same weights.
    listing = [
        [Path(version.path).name, version.size_bytes, digest]
        for version, digest in zip(versions, digests, strict=True)
    ]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def _digest(version: FileVersion, cache: Path | None, meter: _Meter, threads: int) -> str:
    with _locked(version, cache):  # ranks of one engine start together: one reads, the others wait
        known = _read_digest(version, cache)
        if known is not None:
            meter.add(version.size_bytes)
            return known
        digest = _hash_file(version, meter, threads)
        if time.time() - max(version.ctime_ns, version.mtime_ns) / 1e9 > _SETTLED_S:
            _write_digest(version, digest, cache)
        return digest


def _hash_file(version: FileVersion, meter: _Meter, threads: int) -> str:
    from blake3 import blake3

    hasher = blake3(max_threads=threads)
    block = memoryview(bytearray(_BLOCK_BYTES))
    path = Path(version.path)
    try:
        # Read, not mapped: a file that is cut while it is mapped kills the process with SIGBUS.
        with path.open("rb", buffering=0) as file:
            left = version.size_bytes  # not to the end: a file that grows would have none
            while left > 0 and (count := file.readinto(block[:left])):
                hasher.update(block[:count])
                meter.add(count)
                left -= count
            after = _version(path, os.fstat(file.fileno()))
    except OSError as error:
        raise ContentError(f"cannot read {path}: {error.strerror}") from error
    if after != version or read_version(path) != version:
        raise ContentError(f"{path} changed while it was read")
    return str(hasher.hexdigest())


def _entry(version: FileVersion, cache: Path) -> Path:
    return cache / f"{hashlib.sha256(version.path.encode()).hexdigest()[:32]}.json"


@contextmanager
def _locked(version: FileVersion, cache: Path | None) -> Iterator[None]:
    if cache is None:
        yield
        return
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(
            _entry(version, cache).with_suffix(".lock"),
            os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW,
            0o600,
        )
    except OSError:  # a read-only volume: digests are not kept, and that is all
        yield
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _read_digest(version: FileVersion, cache: Path | None) -> str | None:
    if cache is None:
        return None
    try:
        # Neither a link to follow nor a pipe to wait for: the folder is the engine's.
        fd = os.open(_entry(version, cache), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            entry = json.loads(file.read(_MAX_ENTRY_BYTES) or b"")
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or entry.get("version") != asdict(version):
        return None
    digest = entry.get("blake3")
    return digest if isinstance(digest, str) and len(digest) == 64 else None


def _write_digest(version: FileVersion, digest: str, cache: Path | None) -> None:
    if cache is None:
        return
    text = json.dumps({"version": asdict(version), "blake3": digest})
    # mkstemp makes it 0600. A full or read-only volume costs the next start some reading.
    with suppress(OSError):
        handle, temporary = tempfile.mkstemp(dir=cache, suffix=".tmp")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(_entry(version, cache))
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise
