# SPDX-License-Identifier: Apache-2.0
"""What criu's image files are: whose memory which one holds, and what the bytes consist of.

Sources: criu/include/magic.h, images/pagemap.proto of CRIU 4.2.
"""

import re
import struct
from pathlib import Path

_PAGEMAP = re.compile(r"pagemap-(\d+)\.img")
_HEAD = struct.Struct("=III")  # two magic numbers, then the size of the first message
_PAGES = re.compile(r"pages-\d+\.img")
_PAGES_ID = 0x08  # field 1 as a number, in protobuf's encoding


def measure_by_kind(sizes: dict[str, int]) -> dict[str, int]:
    """Given bytes by file name, return bytes by kind: `pages-1.img` is of kind `pages`."""
    kinds: dict[str, int] = {}
    for name, size in sizes.items():
        kind = re.sub(r"(-[0-9a-fx]+)*\.img(\.lz4)?$", "", Path(name).name)
        kinds[kind] = kinds.get(kind, 0) + size
    return dict(sorted(kinds.items(), key=lambda item: -item[1]))


def is_memory(name: str) -> bool:
    """Given a file of an artifact, tell whether it is memory and nothing else, as it was."""
    return _PAGES.fullmatch(Path(name).name) is not None


def measure_by_process(images: Path) -> dict[int, int]:
    """Given the image folder, return the bytes of private memory by PID."""
    sizes = {}
    for path in images.iterdir():
        if match := _PAGEMAP.fullmatch(path.name):
            number = read_pages_id(path.read_bytes())
            pages = images / f"pages-{number}.img"
            sizes[int(match[1])] = pages.stat().st_size if pages.exists() else 0
    return dict(sorted(sizes.items()))


def read_pages_id(pagemap: bytes) -> int:
    """Given a pagemap file, return the number of the file that has its pages; 0 where none is
    named."""
    if len(pagemap) < _HEAD.size:
        return 0
    size = _HEAD.unpack_from(pagemap)[2]
    message = pagemap[_HEAD.size : _HEAD.size + size]
    if not message or message[0] != _PAGES_ID:
        return 0
    value = 0
    for position, byte in enumerate(message[1:6]):
        value |= (byte & 0x7F) << 7 * position
        if byte < 0x80:
            break
    return value
