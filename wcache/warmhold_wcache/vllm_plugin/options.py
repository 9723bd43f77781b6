# SPDX-License-Identifier: Apache-2.0
"""The loader's settings, from `--model-loader-extra-config`. Pure: no torch, no vLLM.

The keys that upstream's `ipc_cache` loader knows keep their meaning; the others are warmhold's own.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

DEFAULT_SOCKET = Path("/run/warmhold/wcache.sock")
DEFAULT_DIGESTS = Path("/var/lib/warmhold/digests")
DEFAULT_SEGMENT_BYTES = 128 << 20
SOCKET_NAME = "wcache.sock"


class Source(StrEnum):
    """Where weights may come from: disk = the checkpoint, then published; ipc_cache = the vault or
    nothing; auto = the vault, else the checkpoint."""

    DISK = "disk"
    IPC_CACHE = "ipc_cache"
    AUTO = "auto"


@dataclass(frozen=True)
class Options:
    """One loader's settings; times in seconds."""

    source: Source = Source.AUTO
    copy: bool = False  # private copies of what the vault holds, not views
    release: bool = False  # after `copy`: the vault drops the generation
    fallback: bool = True  # without the vault: load from disk, do not fail
    connect_timeout_s: float = 5.0
    state_timeout_s: float = 300.0
    socket_path: Path = DEFAULT_SOCKET
    cpu_linear: str = "shared"
    digests: Path | None = DEFAULT_DIGESTS
    segment_bytes: int = DEFAULT_SEGMENT_BYTES
    launch_key: Mapping[str, str] = field(default_factory=dict)
    report: Path | None = None  # a folder where what happened is written
    publish: bool = True
    disk_format: str = "auto"  # what reads the checkpoint: one of vLLM's own load formats
    rest: Mapping[str, Any] = field(default_factory=dict)  # for vLLM's own loader


def read_options(extra: Mapping[str, Any], load_format: str) -> Options:
    """Given the extra configuration and the load format it came with, return the settings; raise
    ValueError on a wrong value. Key `file` names a JSON file with more of them, which count less.
    Keys that are not known go to vLLM's loader, which refuses its own."""
    rest = _read_file(extra)
    if "socket_dir" in extra:
        rest.pop("socket_path", None)
    rest |= extra
    rest.pop("file", None)
    # Upstream marks a draft model's load with it; here the model's own identity tells.
    rest.pop("is_draft", None)
    mode = _choice(rest.pop("mode", "zero_copy"), "mode", ("zero_copy", "copy", *Source))
    fallback = _flag(rest, "fallback", True)
    default = mode if mode in tuple(Source) else _default_source(load_format, fallback)
    source = Source(_choice(rest.pop("source", default), "source", tuple(Source)))
    if "socket_path" in rest:
        socket_path = Path(str(rest.pop("socket_path")))
        rest.pop("socket_dir", None)
    elif "socket_dir" in rest:
        socket_path = Path(str(rest.pop("socket_dir"))) / SOCKET_NAME
    else:
        socket_path = DEFAULT_SOCKET
    digests = rest.pop("digests", str(DEFAULT_DIGESTS))
    report = rest.pop("report", None)
    launch_key = rest.pop("launch_key", {})
    if not isinstance(launch_key, Mapping):
        raise ValueError("launch_key must be an object of strings")
    return Options(
        source=source,
        copy=mode == "copy",
        release=_flag(rest, "release", False),
        fallback=fallback,
        connect_timeout_s=_seconds(rest, "connect_timeout_s", 5.0),
        state_timeout_s=_seconds(rest, "state_timeout_s", 300.0),
        socket_path=socket_path,
        cpu_linear=_choice(rest.pop("cpu_linear", "shared"), "cpu_linear", ("shared", "packed")),
        digests=Path(str(digests)) if digests else None,
        segment_bytes=_size(rest, "segment_bytes", DEFAULT_SEGMENT_BYTES),
        launch_key={str(name): str(value) for name, value in launch_key.items()},
        report=Path(str(report)) if report else None,
        publish=_flag(rest, "publish", True),
        disk_format=str(rest.pop("disk_format", "auto")),
        rest=rest,
    )


def _read_file(extra: Mapping[str, Any]) -> dict[str, Any]:
    if "file" not in extra:
        return {}
    try:
        content = json.loads(Path(str(extra["file"])).read_text(encoding="utf-8"))
        return dict(content)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"file {extra['file']} holds no settings: {error}") from error


def _default_source(load_format: str, fallback: bool) -> str:
    # Upstream: `--load-format ipc_cache` with fallback=false waits for its daemon, then fails.
    return Source.IPC_CACHE if load_format == "ipc_cache" and not fallback else Source.AUTO


def _choice(value: object, name: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
    return str(value)


def _flag(rest: dict[str, Any], name: str, default: bool) -> bool:
    value = rest.pop(name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {value!r}")
    return value


def _seconds(rest: dict[str, Any], name: str, default: float) -> float:
    value = rest.pop(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name} must be a positive number of seconds, not {value!r}")
    return float(value)


def _size(rest: dict[str, Any], name: str, default: int) -> int:
    value = rest.pop(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 << 20:
        raise ValueError(f"{name} must be a number of bytes, at least 1 MiB, not {value!r}")
    return value
