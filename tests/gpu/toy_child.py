# SPDX-License-Identifier: Apache-2.0
"""A CUDA process to checkpoint: with plain memory, and with segments mapped or unmapped."""

import os
import sys
from pathlib import Path

import torch
from gpu_stand import tell_and_wait
from segments_child import map_all, publish
from warmhold_wcache.vllm_plugin.memory import find_memory

GIB = 1 << 30


def main() -> None:
    kind, socket = sys.argv[1:]
    plain = torch.arange(GIB // 8, dtype=torch.int64, device="cuda")
    before = int(plain.sum())
    if kind == "plain":
        tell_and_wait({"pid": os.getpid()})
        tell_and_wait({"equal": int(plain.sum()) == before, "sound": True})
        return
    memory = find_memory(torch.device("cuda"))
    assert memory is not None
    published = publish(memory, Path(socket), "4", str(GIB // 4))
    addresses = [segment.address for segment in published.segments]
    if kind == "unmapped":
        for segment in published.segments:
            memory.unmap_keep_address(segment.address, segment.size_bytes)
    tell_and_wait({"pid": os.getpid()})
    again = addresses if kind == "unmapped" else None
    _, mapped, seen = map_all(memory, Path(socket), again)
    same = again is None or mapped == again
    tell_and_wait({**seen, "equal": int(plain.sum()) == before and same})


if __name__ == "__main__":
    main()
