# SPDX-License-Identifier: Apache-2.0
r"""What the memory in a snapshot consists of: by process, zeros, equal pages, how full pages are.

    docker cp bench/image_pages.py CONTAINER:/tmp
    docker exec CONTAINER python3 /tmp/image_pages.py /var/lib/warmhold/snapshots/NAME/images

Of a snapshot that is not in LZ4. MiB throughout. Standard library only.
Sources: images/pagemap.proto, criu/include/magic.h of CRIU 4.2.
"""

import hashlib
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

PAGE = 4096
ADDRESS, PAGES, FLAGS, LONG_PAGES = 1, 2, 4, 5  # fields of a pagemap entry
PRESENT = 4


def read_fields(message: bytes) -> dict[int, int]:
    """Numbers of a protobuf message by field; a pagemap has no others."""

    def number(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte = message[at]
            value |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80:
                return value, at

    fields, at = {}, 0
    while at < len(message):
        tag, at = number(at)
        fields[tag >> 3], at = number(at)
    return fields


def read_messages(path: Path) -> Iterator[dict[int, int]]:
    content, at = path.read_bytes(), 8  # two magic numbers
    while at < len(content):
        (size,) = struct.unpack_from("=I", content, at)
        yield read_fields(content[at + 4 : at + 4 + size])
        at += 4 + size


def read_pages(images: Path, pagemap: Path) -> Iterator[tuple[int, bytes]]:
    """Each page that a process has in the image, with its address."""
    head, *entries = read_messages(pagemap)
    with (images / f"pages-{head[1]}.img").open("rb") as pages:
        for entry in entries:
            if entry.get(FLAGS, PRESENT) & PRESENT:
                for index in range(entry.get(PAGES) or entry[LONG_PAGES]):
                    yield entry[ADDRESS] + PAGE * index, pages.read(PAGE)


def main(folder: str) -> None:
    images = Path(folder)
    seen: dict[int, set[bytes]] = {}
    total = 0
    for pagemap in sorted(images.glob("pagemap-[0-9]*.img")):
        pid = int(pagemap.stem.removeprefix("pagemap-"))
        digests, count, zeros, full = set(), 0, 0, [0, 0, 0, 0]
        for _, page in read_pages(images, pagemap):
            blank = page.count(0)
            zeros += blank == PAGE
            full[min(3, (PAGE - blank) * 4 // PAGE)] += 1
            digests.add(hashlib.blake2b(page, digest_size=12).digest())
            count += 1
        quarters = ", ".join(f"{pages * PAGE >> 20}" for pages in full)
        print(
            f"{pid}: {count * PAGE >> 20}, zeros {zeros * PAGE >> 20}, distinct "
            f"{len(digests) * PAGE >> 20}, by quarter of bytes that are not zero: {quarters}"
        )
        seen[pid], total = digests, total + count
    together = set().union(*seen.values())
    print(f"all: {total * PAGE >> 20}, distinct {len(together) * PAGE >> 20}")


if __name__ == "__main__":
    main(sys.argv[1])
