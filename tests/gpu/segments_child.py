# SPDX-License-Identifier: Apache-2.0
"""One CUDA process of the tests: publishes segments, or maps what was published, step by step."""

import json
import os
import sys
import time
from pathlib import Path

import torch
from gpu_stand import tell, tell_and_wait
from warmhold_wcache.client import VaultClient
from warmhold_wcache.errors import WcacheError
from warmhold_wcache.generation import Generation, Segment
from warmhold_wcache.vllm_plugin.memory import Memory, find_memory

KEY = {"model": "pattern"}


def pattern(index: int, size: int) -> torch.Tensor:
    """Words that differ in every segment and place."""
    words = torch.arange(size // 8, dtype=torch.int64, device="cuda")
    return words * (2 * index + 3) + index


def make(memory: Memory, count: int, size: int) -> tuple[Generation, list[int]]:
    """Segments of the pattern, and their descriptors."""
    made, fds = [], []
    for index in range(count):
        fd, address = memory.allocate(size, f"test-{index}")
        memory.view(address, size).view(torch.int64).copy_(pattern(index, size))
        memory.freeze(fd, address, size)
        made.append(Segment(size, address, memory.checksum(fd, address, size)))
        fds.append(fd)
    parts = (memory.backend, memory.device, "pattern", tuple(made), (), {}, {})
    return Generation(KEY, {}, *parts), fds


def publish(memory: Memory, socket: Path, count: str, size: str) -> Generation:
    """Publish, and say how long it took."""
    began = time.monotonic()
    generation, fds = make(memory, int(count), int(size))
    filled = time.monotonic()
    with VaultClient(socket) as client:
        client.publish(generation, fds)
    for fd in fds:
        os.close(fd)
    seconds = [round(filled - began, 3), round(time.monotonic() - filled, 4)]
    tell_and_wait({"id": generation.id, "make_s": seconds[0], "publish_s": seconds[1]})
    return generation


def map_all(
    memory: Memory, socket: Path, addresses: list[int] | None = None
) -> tuple[Generation, list[int], dict[str, object]]:
    """Map what is published, at the given addresses; return it with what was found."""
    began = time.monotonic()
    with VaultClient(socket) as client:
        generation, fds = client.fetch(KEY)
    wanted: list[int | None] = [*(addresses or [None] * len(fds))]
    pairs = list(zip(generation.segments, fds, wanted, strict=True))
    mapped = [memory.map(fd, segment.size_bytes, address) for segment, fd, address in pairs]
    map_s = round(time.monotonic() - began, 4)
    for fd in fds:
        os.close(fd)
    began = time.monotonic()
    sound = all(
        memory.checksum(-1, address, segment.size_bytes) == segment.checksum
        for segment, address in zip(generation.segments, mapped, strict=True)
    )
    checksum_s = round(time.monotonic() - began, 4)
    last = len(mapped) - 1
    size = generation.segments[last].size_bytes
    equal = torch.equal(memory.view(mapped[last], size).view(torch.int64), pattern(last, size))
    torch.cuda.empty_cache()
    seen = {"map_s": map_s, "checksum_s": checksum_s, "sound": sound, "equal": equal}
    return generation, mapped, seen


def show(memory: Memory) -> None:
    """What one descriptor looks like from outside of CUDA."""
    fd, address = memory.allocate(memory.granularity_bytes, "test")
    status = os.fstat(fd)
    tell(
        {
            "link": os.readlink(f"/proc/self/fd/{fd}"),  # noqa: PTH115
            "mode": oct(status.st_mode),
            "rdev": [os.major(status.st_rdev), os.minor(status.st_rdev)],
            "size": status.st_size,
            "fdinfo": Path(f"/proc/self/fdinfo/{fd}").read_text(),
            "inheritable": os.get_inheritable(fd),
            "granularity": memory.granularity_bytes,
            "device": memory.device,
            "view": str(memory.view(address, 16).device),
        }
    )


def remap(memory: Memory, socket: Path) -> None:
    """Map, unmap and keep the addresses, map again."""
    generation, addresses, seen = map_all(memory, socket)
    tell_and_wait({**seen, "pid": os.getpid()})
    for segment, address in zip(generation.segments, addresses, strict=True):
        memory.unmap_keep_address(address, segment.size_bytes)
    tell_and_wait({"unmapped": len(addresses)})
    _, again, seen = map_all(memory, socket, addresses)
    forbidden = getattr(memory, "can_forbid_writing", None)
    tell_and_wait({**seen, "same_addresses": again == addresses, "read_only": forbidden})


def write(memory: Memory, socket: Path) -> None:
    """Write into what is mapped read-only: the driver ends the context."""
    generation, addresses, _ = map_all(memory, socket)
    view = memory.view(addresses[0], generation.segments[0].size_bytes)
    try:
        view.fill_(0)
        torch.cuda.synchronize()
    except Exception as error:
        tell({"refused": str(error).splitlines()[0]})
    else:
        tell({"refused": ""})


def detach(memory: Memory, socket: Path) -> None:
    """Make the first segment private, write into it, and look at the published one."""
    generation, addresses, _ = map_all(memory, socket)
    first = generation.segments[0]
    memory.make_private(addresses[0], first.size_bytes)
    mine = memory.view(addresses[0], first.size_bytes)
    copied = memory.checksum(-1, addresses[0], first.size_bytes) == first.checksum
    mine.fill_(7)
    torch.cuda.synchronize()
    _, _, seen = map_all(memory, socket)
    tell({**seen, "copied": copied, "written": bool((mine == 7).all())})


def misfit(memory: Memory) -> None:
    """Map descriptors that are the driver's, and no memory or of another size."""
    fd, _ = memory.allocate(2 * memory.granularity_bytes, "test")
    plain = os.open("/dev/nvidiactl", os.O_RDWR)
    texts = []
    for given, size in ((plain, 1), (fd, 1), (fd, 4)):
        try:
            memory.map(given, size * memory.granularity_bytes)
        except WcacheError as error:
            texts.append(error.detail)
        else:
            texts.append("")
    tell(texts)


def main() -> None:
    verb, socket, *rest = sys.argv[1:]
    memory = find_memory(torch.device("cuda"))
    assert memory is not None
    acts = {"remap": remap, "write": write, "detach": detach}
    if verb == "publish":
        publish(memory, Path(socket), *rest)
    elif verb in acts:
        acts[verb](memory, Path(socket))
    elif verb == "show":
        show(memory)
    elif verb == "misfit":
        misfit(memory)
    else:
        raise SystemExit(json.dumps(sys.argv))


if __name__ == "__main__":
    main()
