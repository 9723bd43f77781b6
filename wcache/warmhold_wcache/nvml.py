# SPDX-License-Identifier: Apache-2.0
"""Closes NVML in this process, and with it the GPU's files that it has open.

torch initialises it whenever it is asked whether there is a GPU, and never shuts it down
(`torch/cuda/__init__.py`, `_raw_device_count_nvml`). An API server, which computes nothing on a
GPU, would therefore be checkpointed and restored by the driver with every snapshot. Whoever needs
NVML later initialises it again, as torch and vLLM do each time.
"""

import ctypes
from pathlib import Path

_LIBRARY = "/libnvidia-ml.so"
_MAPS = Path("/proc/self/maps")
_USERS = 1_000_000  # it counts them; more than this is no count


def close(maps: Path = _MAPS) -> int:
    """Shut NVML down as often as it was initialised; return how often. It is not loaded for that;
    where it is none of this process's, nothing is done."""
    lines = maps.read_text().splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in lines if _LIBRARY in line}
    closed = 0
    for path in sorted(paths):
        try:
            shutdown = ctypes.CDLL(path).nvmlShutdown
        except (OSError, AttributeError):
            continue
        while closed < _USERS and shutdown() == 0:
            closed += 1
    return closed
