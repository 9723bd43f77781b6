# SPDX-License-Identifier: Apache-2.0
"""Leaves zeros out of criu's images, after the dump: anonymous memory that an image has no pages of
reads as zeros all the same, and a restore has less to read.

What the driver brings to the host of a GPU's state are zeros for the most part. Nothing is assumed
about an image that is not as expected: it stays as it is.
Sources: images/pagemap.proto, mm.proto and vma.proto, restore_priv_vma_content in criu/mem.c and
do_restore_shmem_content in criu/shmem.c of CRIU 4.2.1.
"""

import bisect
import mmap
import os
import re
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

# Every gap costs the restore one more piece to read, so single pages stay.
BLOCK_BYTES = 64 << 10
_PAGE_BYTES = 4096
_COPY_BYTES = 4 << 20
_NAME = re.compile(r"pagemap-(shmem-)?(\d+)\.img")
_MAGIC_BYTES = 8
_SIZE = struct.Struct("=I")
_PRESENT = (4, 6)  # PE_PRESENT, with PE_LAZY where it could come later; none is in a parent image
_ANONYMOUS, _OTHERWISE = 1 << 9, 1 << 2 | 1 << 3 | 1 << 12 | 1 << 13 | 1 << 16 | 1 << 17
_VMAS, _START, _END, _STATUS = 14, 1, 2, 7  # fields of mm_entry and of vma_entry
_ADDRESS, _COUNT_32, _IN_PARENT, _FLAGS, _COUNT = 1, 2, 3, 4, 5  # of pagemap_entry
_ZEROS, _LOOK_BYTES = bytes(BLOCK_BYTES), 64

Area = tuple[int, int]  # addresses from, to


class _UnexpectedError(Exception):
    """An image that is not as it is known here."""


@dataclass(frozen=True)
class _Run:
    """Pages that follow each other, in memory and in the file of pages; as it was written, `wide`
    with a count of 64 bits in place of the one of 32."""

    address: int
    count: int
    flags: int
    wide: bool


def drop_zeros(images: Path) -> int:
    """Given the image folder of a finished dump, leave zeros out; return their bytes. Raise OSError
    where that fails in the middle: the images are of no use then."""
    found = [match for path in images.iterdir() if (match := _NAME.fullmatch(path.name))]
    with ThreadPoolExecutor(4, "zeros") as pool:
        return sum(pool.map(lambda match: _drop(images, match), found))


def _drop(images: Path, match: re.Match[str]) -> int:
    path = images / match[0]
    try:
        text = path.read_bytes()
        head, *entries = _split(text)
        pages = images / f"pages-{_fields(head)[1]}.img"
        runs = [_read_run(entry) for entry in entries]
        # Shared memory's addresses are offsets, and all of it is anonymous.
        areas = [(0, 1 << 64)] if match[1] else _read_areas(images / f"mm-{match[2]}.img")
        if pages.stat().st_size != _PAGE_BYTES * sum(run.count for run in runs):
            return 0
    except (_UnexpectedError, FileNotFoundError, KeyError, ValueError, IndexError, struct.error):
        return 0
    with pages.open("r+b", buffering=0) as file:
        kept = list(_find_kept(file.fileno(), runs, areas))
        dropped = sum(run.count for run in runs) - sum(run.count for _, run in kept)
        if dropped:
            _compact(file.fileno(), [(place, run.count * _PAGE_BYTES) for place, run in kept])
    if dropped:
        new = path.with_suffix(".new")
        messages = [head, *(_write_run(run) for _, run in kept)]
        body = b"".join(_SIZE.pack(len(message)) + message for message in messages)
        new.write_bytes(text[:_MAGIC_BYTES] + body)
        new.replace(path)
    return dropped * _PAGE_BYTES


def _find_kept(fd: int, runs: Sequence[_Run], areas: Sequence[Area]) -> Iterator[tuple[int, _Run]]:
    """What is left of the runs, each with its place in the file."""
    size = os.fstat(fd).st_size
    if size == 0:
        return
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as pages:
        place = 0
        for run in runs:
            begin, total = 0, run.count * _PAGE_BYTES
            for zero, end in _find_zeros(pages, place, run, areas):
                if zero > begin:
                    yield place + begin, _part(run, begin, zero)
                begin = end
            if total > begin:
                yield place + begin, _part(run, begin, total)
            place += total


def _find_zeros(
    pages: mmap.mmap, place: int, run: _Run, areas: Sequence[Area]
) -> Iterator[tuple[int, int]]:
    """The blocks of zeros in a run that lie in one of the areas, as offsets in the run."""
    total = run.count * _PAGE_BYTES
    first = bisect.bisect_right(areas, run.address, key=lambda area: area[1])
    for start, end in areas[first:]:
        if start >= run.address + total:
            return
        at = max(start - run.address, 0)
        limit = min(end - run.address, total)
        while at + BLOCK_BYTES <= limit:
            here = place + at
            # Most blocks differ at once.
            if pages[here : here + _LOOK_BYTES] == _ZEROS[:_LOOK_BYTES] and (
                pages[here : here + BLOCK_BYTES] == _ZEROS
            ):
                yield at, at + BLOCK_BYTES
            at += BLOCK_BYTES


def _part(run: _Run, begin: int, end: int) -> _Run:
    count = (end - begin) // _PAGE_BYTES
    return replace(run, address=run.address + begin, count=count)


def _compact(fd: int, kept: Sequence[tuple[int, int]]) -> None:
    """Given what to keep of a file, as places and sizes in order, move it to its beginning."""
    block = memoryview(bytearray(_COPY_BYTES))
    target = 0
    for place, size in kept:
        done = size if place == target else 0
        while done < size:
            count = os.preadv(fd, [block[: size - done]], place + done)
            if count == 0 or os.pwrite(fd, block[:count], target + done) != count:
                raise OSError(f"{size - done} bytes are missing at {place + done}")
            done += count
        target += size
    os.truncate(fd, target)


def _read_areas(path: Path) -> list[Area]:
    """The anonymous private memory of a process, in order."""
    (message,) = _split(path.read_bytes())
    areas = []
    for number, value in _walk(message):
        if number == _VMAS and isinstance(value, bytes):
            fields = _fields(value)
            status = fields[_STATUS]
            if status & _ANONYMOUS and not status & _OTHERWISE:
                areas.append((fields[_START], fields[_END]))
    return sorted(areas)


def _read_run(entry: bytes) -> _Run:
    fields = _fields(entry)
    flags = fields.get(_FLAGS, 0)
    if fields.get(_IN_PARENT) or flags not in _PRESENT or set(fields) - set(range(1, 6)):
        raise _UnexpectedError
    return _Run(fields[_ADDRESS], fields.get(_COUNT, fields[_COUNT_32]), flags, _COUNT in fields)


def _write_run(run: _Run) -> bytes:
    fields = [(_ADDRESS, run.address), (_COUNT_32, 0 if run.wide else run.count)]
    fields += [(_FLAGS, run.flags), *([(_COUNT, run.count)] if run.wide else [])]
    return b"".join(_varint(number << 3) + _varint(value) for number, value in fields)


def _split(text: bytes) -> list[bytes]:
    """The messages of an image."""
    at, messages = _MAGIC_BYTES, []
    while at < len(text):
        (size,) = _SIZE.unpack_from(text, at)
        at += _SIZE.size
        if at + size > len(text):
            raise _UnexpectedError
        messages.append(text[at : at + size])
        at += size
    return messages


def _fields(message: bytes) -> dict[int, int]:
    """The numbers of a message by field."""
    return {number: value for number, value in _walk(message) if isinstance(value, int)}


def _walk(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Protobuf's encoding: every field with its number; what is not a varint as bytes."""
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _read_varint(message, at)
            yield key >> 3, value
            continue
        size = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            size, at = _read_varint(message, at)
        if size is None or at + size > len(message):
            raise _UnexpectedError
        yield key >> 3, message[at : at + size]
        at += size


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
