# SPDX-License-Identifier: Apache-2.0
"""Asks the NVIDIA driver which GPUs a process of this container may use.

A script of its own, since whoever has called cuInit holds the devices open until its end and must
not fork. The standard library alone, started without site-packages, because it stands before every
start:

    python -I -S gpu_probe.py

Prints `version N` (CUDA's, 13000 for 13.0), `checkpoint 0|1` (the driver can checkpoint), and for
each GPU `gpu UUID BYTES CAPABILITY NAME`; or `error TEXT`. Sees what the engine will see: it obeys
CUDA_VISIBLE_DEVICES. Sources: cuda.h of CUDA 12.8 and 13.0.
"""

import ctypes
import sys

LIBRARY = "libcuda.so.1"
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_MAJOR, _MINOR = 75, 76  # CUdevice_attribute: of the compute capability
_NAME_BYTES = 256


class ProbeError(Exception):
    """Why the driver does not answer."""


class Driver:
    """libcuda, initialised."""

    def __init__(self) -> None:
        try:
            self.library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise ProbeError(str(error)) from None
        result = self.library.cuInit(0)
        self.count = 0
        if result != _NO_DEVICE:
            self.check("cuInit", result)
            count = ctypes.c_int()
            self.call("cuDeviceGetCount", ctypes.byref(count))
            self.count = count.value

    def call(self, name: str, *arguments: object) -> None:
        """Given a function and its arguments, call it; raise ProbeError where it fails."""
        self.check(name, getattr(self.library, name)(*arguments))

    def check(self, name: str, result: int) -> None:
        """Given a function's name and result, raise ProbeError where it failed."""
        if result:
            text = ctypes.c_char_p()
            self.library.cuGetErrorName(result, ctypes.byref(text))
            raise ProbeError(f"{name}: {(text.value or b'error').decode()} ({result})")

    def version(self) -> int:
        """Return the CUDA version that the driver speaks."""
        found = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(found))
        return found.value

    def describe(self, ordinal: int) -> str:
        """Given a GPU's number, return its UUID, bytes, compute capability and name."""
        device, size = ctypes.c_int(), ctypes.c_size_t()
        major, minor = ctypes.c_int(), ctypes.c_int()
        uuid, name = ctypes.create_string_buffer(16), ctypes.create_string_buffer(_NAME_BYTES)
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        self.call("cuDeviceGetUuid_v2", uuid, device)
        self.call("cuDeviceGetName", name, _NAME_BYTES, device)
        self.call("cuDeviceTotalMem_v2", ctypes.byref(size), device)
        self.call("cuDeviceGetAttribute", ctypes.byref(major), _MAJOR, device)
        self.call("cuDeviceGetAttribute", ctypes.byref(minor), _MINOR, device)
        digits = uuid.raw.hex()
        parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
        capability = f"{major.value}.{minor.value}"
        return f"{'-'.join(parts)} {size.value} {capability} {name.value.decode(errors='replace')}"


def probe() -> list[str]:
    """Return the lines to be printed."""
    try:
        driver = Driver()
        lines = [f"version {driver.version()}"]
        lines.append(f"checkpoint {int(hasattr(driver.library, 'cuCheckpointProcessLock'))}")
        return lines + [f"gpu {driver.describe(ordinal)}" for ordinal in range(driver.count)]
    except (ProbeError, AttributeError) as error:
        return [f"error {error}"]


if __name__ == "__main__":
    sys.stdout.write("\n".join(probe()) + "\n")
