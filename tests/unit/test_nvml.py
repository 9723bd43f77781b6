# SPDX-License-Identifier: Apache-2.0
"""NVML in a process that others have initialised it in."""

import ctypes
import subprocess
from pathlib import Path

from warmhold_wcache import nvml

SOURCE = Path(__file__).parents[1] / "fakes" / "libnvidia_ml.c"


def test_it_is_shut_down_as_often_as_it_was_initialised(tmp_path: Path) -> None:
    assert nvml.close() == 0  # and it is not loaded for that
    path = tmp_path / "libnvidia-ml.so.1"
    command = ["gcc", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(path)]
    subprocess.run([*command, str(SOURCE)], check=True, timeout=60)
    library = ctypes.CDLL(str(path))
    for _ in range(3):
        library.nvmlInit()
    assert nvml.close() == 3
    assert library.nvmlShutdown() == 1
    assert nvml.close() == 0


def test_a_library_that_is_none(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    lines = [f"7f00-7f01 r-xp 00000000 00:00 1     {tmp_path}/libnvidia-ml.so.1 (deleted)"]
    lines.append("7f02-7f03 r-xp 00000000 00:00 1")
    maps.write_text("\n".join(lines) + "\n")
    assert nvml.close(maps) == 0
