# SPDX-License-Identifier: Apache-2.0
"""Asks NVML how much memory of GPUs is free, which needs no context on them.

A script of its own, since NVML's descriptors would make its caller look like a user of the GPU:

    python -I -S gpu_memory_probe.py UUID...

Prints `free UUID BYTES` for each, or `error TEXT`. A UUID is without its prefix, as gpu_probe has
it. Source: nvml.h of CUDA 12.8 and 13.0.
"""

import ctypes
import sys

LIBRARY = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def probe(uuids: list[str]) -> list[str]:
    """Given UUIDs, return the lines to be printed."""
    try:
        library = ctypes.CDLL(LIBRARY)
        library.nvmlErrorString.restype = ctypes.c_char_p
        _check(library, "nvmlInit_v2")
        return [f"free {uuid} {_read_free(library, uuid)}" for uuid in uuids]
    except (OSError, AttributeError) as error:
        return [f"error {error}"]


def _read_free(library: ctypes.CDLL, uuid: str) -> int:
    handle, memory = ctypes.c_void_p(), _Memory()
    name = f"GPU-{uuid}".encode()
    _check(library, "nvmlDeviceGetHandleByUUID", name, ctypes.byref(handle))
    _check(library, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    return int(memory.free)


def _check(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    if result := getattr(library, name)(*arguments):
        text = library.nvmlErrorString(result) or b"error"
        raise OSError(f"{name}: {text.decode(errors='replace')} ({result})")


if __name__ == "__main__":
    sys.stdout.write("\n".join(probe(sys.argv[1:])) + "\n")
