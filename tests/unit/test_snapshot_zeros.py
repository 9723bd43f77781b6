# SPDX-License-Identifier: Apache-2.0
"""Zeros that are left out of images: what is left describes the same memory."""

import random
import struct
from pathlib import Path

import pytest
from warmhold_snapshot.zeros import BLOCK_BYTES, drop_zeros

PAGE = 4096
BLOCK = BLOCK_BYTES // PAGE
MAGIC = struct.pack("<II", 0x54564319, 0x56084025)
ANONYMOUS, HEAP, FILE, VDSO = 0x201, 0x221, 0x41, 0x209
Run = tuple[int, int]  # a page's number in memory, how many follow


def varint(value: int) -> bytes:
    text = b""
    while value >= 0x80:
        text, value = text + bytes([value & 0x7F | 0x80]), value >> 7
    return text + bytes([value])


def message(**fields: int) -> bytes:
    """Fields by number: f1=7 is field 1 with 7."""
    return b"".join(varint(int(name[1:]) << 3) + varint(value) for name, value in fields.items())


def write_image(path: Path, messages: list[bytes]) -> None:
    path.write_bytes(MAGIC + b"".join(struct.pack("<I", len(item)) + item for item in messages))


def write_pagemap(
    folder: Path, name: str, runs: list[Run], content: list[bytes], flags: int = 6, **more: int
) -> None:
    entries = [message(f1=at * PAGE, f2=0, f4=flags, f5=count, **more) for at, count in runs]
    write_image(folder / f"pagemap-{name}.img", [message(f1=300), *entries])
    (folder / "pages-300.img").write_bytes(b"".join(content))


def write_areas(folder: Path, pid: int, areas: list[tuple[int, int, int]]) -> None:
    """Areas as first page, end page and status."""
    text = message(f1=1)
    for start, end, status in areas:
        area = message(f1=start * PAGE, f2=end * PAGE, f3=0, f4=0, f5=3, f6=0x22, f7=status, f8=1)
        text += varint(14 << 3 | 2) + varint(len(area)) + area
    text += varint(15 << 3 | 1) + bytes(8) + varint(16 << 3 | 5) + bytes(4)
    write_image(folder / f"mm-{pid}.img", [text])


def read_memory(folder: Path, name: str) -> dict[int, bytes]:
    """The pages that an image has, by number."""
    text = (folder / f"pagemap-{name}.img").read_bytes()
    assert text.startswith(MAGIC)
    pages, at, memory, place = (folder / "pages-300.img").read_bytes(), len(MAGIC), {}, 0
    messages = []
    while at < len(text):
        (size,) = struct.unpack_from("<I", text, at)
        messages.append(text[at + 4 : at + 4 + size])
        at += 4 + size
    for entry in messages[1:]:
        values, position = [], 0
        while position < len(entry):
            value = shift = 0
            while True:
                byte = entry[position]
                value, shift, position = value | (byte & 0x7F) << shift, shift + 7, position + 1
                if byte < 0x80:
                    break
            values.append(value)
        fields = dict(zip([key >> 3 for key in values[::2]], values[1::2], strict=True))
        assert fields[2] == 0 and fields[4] == 6
        for index in range(fields[5]):
            memory[fields[1] // PAGE + index] = pages[place : place + PAGE]
            place += PAGE
    assert place == len(pages)
    return memory


def test_what_is_left_is_the_same_memory(tmp_path: Path) -> None:
    """Of random memory: anonymous areas, a heap, files' and the vdso's pages between them."""
    source = random.Random(7)  # noqa: S311 - the same memory every time
    for index in range(20):
        folder = tmp_path / str(index)
        folder.mkdir()
        areas: list[tuple[int, int, int]] = []
        runs: list[Run] = []
        content: list[bytes] = []
        at = 1000
        for _ in range(12):
            size = source.randrange(1, 5 * BLOCK)
            areas.append((at, at + size, source.choice([ANONYMOUS, ANONYMOUS, HEAP, FILE, VDSO])))
            first = source.randrange(size)
            runs.append((at + first, size - first))
            while first < size:
                count = min(source.randrange(1, 3 * BLOCK), size - first)
                content += [bytes([source.choice([0, 0, 9])]) * PAGE] * count
                first += count
            at += size + source.choice([0, 0, 7])
        write_areas(folder, 42, areas)
        write_pagemap(folder, "42", runs, content)
        before = read_memory(folder, "42")
        dropped = drop_zeros(folder)
        after = read_memory(folder, "42")
        assert dropped == PAGE * (len(before) - len(after))
        for number in before:
            (status,) = (kind for start, end, kind in areas if start <= number < end)
            if number not in after:
                assert before[number] == bytes(PAGE) and status in (ANONYMOUS, HEAP)
            else:
                assert before[number] == after[number]


def test_runs_of_zeros_go_and_single_pages_stay(tmp_path: Path) -> None:
    write_areas(tmp_path, 42, [(100, 100 + 4 * BLOCK, ANONYMOUS)])
    content = [bytes(PAGE)] * (4 * BLOCK)
    content[0] = content[-1] = b"x" * PAGE
    write_pagemap(tmp_path, "42", [(100, 4 * BLOCK)], content)
    assert drop_zeros(tmp_path) == 2 * BLOCK_BYTES
    assert len(read_memory(tmp_path, "42")) == 2 * BLOCK
    assert drop_zeros(tmp_path) == 0


def test_shared_memory_is_all_anonymous(tmp_path: Path) -> None:
    content = [bytes(PAGE)] * (3 * BLOCK)
    content[BLOCK] = b"x" * PAGE
    write_pagemap(tmp_path, "shmem-7", [(0, 3 * BLOCK)], content)
    assert drop_zeros(tmp_path) == 2 * BLOCK_BYTES
    assert sorted(read_memory(tmp_path, "shmem-7")) == list(range(BLOCK, 2 * BLOCK))


@pytest.mark.parametrize("what", ["parent", "lazy", "field", "short", "cut", "no pages", "no mm"])
def test_an_image_that_is_not_as_expected_stays(tmp_path: Path, what: str) -> None:
    write_areas(tmp_path, 42, [(100, 100 + BLOCK, ANONYMOUS)])
    content = [bytes(PAGE)] * BLOCK
    flags = {"parent": 1, "lazy": 2}.get(what, 6)
    more = {"f6": 1} if what == "field" else {}
    write_pagemap(tmp_path, "42", [(100, BLOCK)], content[what == "short" :], flags, **more)
    pagemap = tmp_path / "pagemap-42.img"
    if what == "cut":
        pagemap.write_bytes(pagemap.read_bytes()[:-1])
    if what in ("no pages", "no mm"):
        (tmp_path / {"no pages": "pages-300.img", "no mm": "mm-42.img"}[what]).unlink()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert drop_zeros(tmp_path) == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
