# SPDX-License-Identifier: Apache-2.0
"""Builds the fake CUDA driver of `fakes/libcuda.c`."""

import subprocess
from pathlib import Path

SOURCE = Path(__file__).parent / "fakes" / "libcuda.c"


def build_fake_cuda(folder: Path, *defines: str) -> Path:
    """Given a folder, build the driver there under its real name; return its path."""
    library = folder / "libcuda.so.1"
    strict = ["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-O1"]
    command = ["gcc", *strict, *(f"-D{name}" for name in defines), "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True, timeout=60)
    return library
