# SPDX-License-Identifier: Apache-2.0
"""Builds the fake CUDA driver of `fakes/libcuda.c`, and the fake NVML of `fakes/libnvml.c`."""

import subprocess
from pathlib import Path

FAKES = Path(__file__).parent / "fakes"
# A /dev of its own with the driver's control device in it: an empty file will do.
DEVICES = """
set -e
mkdir -p "$0/dev" && mount -t tmpfs none "$0/dev" && mkdir "$0/dev/shm"
mount --bind /dev/shm "$0/dev/shm"
for name in null zero random urandom; do touch "$0/dev/$name"; mount --bind "/dev/$name" "$0/dev/$name"; done
ln -s /proc/self/fd "$0/dev/fd"; ln -s fd/1 "$0/dev/stdout"; ln -s fd/2 "$0/dev/stderr"
touch "$0/dev/nvidiactl"
mount --rbind "$0/dev" /dev
exec "$@"
"""  # noqa: E501


def build_fake_cuda(folder: Path, *defines: str) -> Path:
    """Given a folder, build the driver there under its real name; return its path."""
    return _build(FAKES / "libcuda.c", folder / "libcuda.so.1", *defines)


def build_fake_nvml(folder: Path) -> Path:
    """Given a folder, build NVML there under its real name; return its path."""
    return _build(FAKES / "libnvml.c", folder / "libnvidia-ml.so.1")


def _build(source: Path, library: Path, *defines: str) -> Path:
    strict = ["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-O1"]
    command = ["gcc", *strict, *(f"-D{name}" for name in defines), "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=60)
    return library
