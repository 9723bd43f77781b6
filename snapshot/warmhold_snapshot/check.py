# SPDX-License-Identifier: Apache-2.0
"""Everything that a dump *and* a restore need of the container, looked at at once.

Each point that is missing comes with the lines of the compose file that give it. What is read is
separate from what is concluded, so that every answer can be tried without the right.
Sources: linux/capability.h, proc(5), criu(8).
"""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import criu, cuda, pids
from .errors import SnapshotError

_CAPABILITIES = {
    "NET_ADMIN": 12,
    "SYS_PTRACE": 19,
    "SYS_ADMIN": 21,
    "SYS_RESOURCE": 24,
    "SYS_TIME": 25,
}
_WHY = {
    "SYS_ADMIN": "namespaces and mount information",
    "SYS_PTRACE": "stopping the engine's processes and reading them",
    "NET_ADMIN": "reading and restoring the state of connections",
    "SYS_TIME": "setting clock offsets at a restore",
    "SYS_RESOURCE": "the limits of an engine that has another uid",
}
_ALWAYS = ("SYS_ADMIN", "SYS_PTRACE", "NET_ADMIN", "SYS_TIME")
_OLDEST_CRIU = (4, 1)
_RESERVED_PIDS = 4096
_DISK = "disk"
_ROOM = "run `snapshot prune --keep 1`, or give the volume `state` more room"
_SPARE_BYTES = 256 << 20  # of the volume, which holds compile caches too


@dataclass(frozen=True)
class Point:
    """One thing that was looked at: name, whether it is there, what was found, what gives it."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class Found:
    """What the container has. `criu_version` and `criu_check` are "" where criu gave none, with the
    reason in `criu_error`; sizes in bytes."""

    capabilities: int
    seccomp: int
    criu_version: str
    criu_error: str
    free_bytes: int
    folder: str
    pid_max: int


def read_found(folder: Path, proc: Path = pids.PROC) -> Found:
    """Given the folder of artifacts, read what the container has; a call of criu is bounded."""
    status = _read_status(proc / "self" / "status")
    version = error = ""
    try:
        version = criu.read_version()
        criu.run_check()
    except SnapshotError as failure:
        error = failure.detail
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return Found(
        capabilities=int(status.get("CapEff", "0"), 16),
        seccomp=int(status.get("Seccomp", "0")),
        criu_version=version,
        criu_error=error,
        free_bytes=shutil.disk_usage(existing).free,
        folder=str(folder),
        pid_max=pids.read_pid_max(proc),
    )


def conclude(
    found: Found,
    estimate_bytes: int = 0,
    other_uid: bool = False,
    above_pid: int = 0,
    plugins: Path | None = None,
) -> list[Point]:
    """Given what was found, the bytes an artifact is expected to have, whether the engine has
    another uid than root, the number that the engine's PIDs start above and, where it is on a GPU,
    the folder of criu's plug-ins, return every point."""
    needed = (*_ALWAYS, "SYS_RESOURCE") if other_uid else _ALWAYS
    points = [_capability(found.capabilities, name) for name in needed]
    points.append(_seccomp(found.seccomp))
    points += _criu(found)
    if plugins is not None:
        missing = cuda.find_missing(plugins)
        remedy = "use the image warmhold:cuda" if missing else ""
        said = f"{missing} is not there" if missing else "its plug-in, and what that calls"
        points.append(Point("criu for CUDA", not missing, said, remedy))
    needed_bytes = estimate_bytes + _SPARE_BYTES
    enough = found.free_bytes >= needed_bytes
    sizes = f"{_mib(found.free_bytes)} MiB free in {found.folder}, {_mib(needed_bytes)} needed"
    points.append(Point(_DISK, enough, sizes, "" if enough else _ROOM))
    enough = found.pid_max >= above_pid + _RESERVED_PIDS
    sizes = f"PIDs end at {found.pid_max}, the engine's start above {above_pid}"
    remedy = f"on the host: sysctl kernel.pid_max={above_pid + _RESERVED_PIDS} (or more)"
    points.append(Point("pid range", enough, sizes, "" if enough else remedy))
    return points


def find_missing_rights(other_uid: bool = False, proc: Path = pids.PROC) -> list[Point]:
    """Given whether the engine has another uid, return the capabilities that are missing and a
    filter that is in the way. Nothing is started for it: it takes a millisecond."""
    status = _read_status(proc / "self" / "status")
    mask = int(status.get("CapEff", "0"), 16)
    needed = (*_ALWAYS, "SYS_RESOURCE") if other_uid else _ALWAYS
    points = [_capability(mask, name) for name in needed]
    points.append(_seccomp(int(status.get("Seccomp", "0"))))
    return [point for point in points if not point.ok]


def require(points: Sequence[Point]) -> None:
    """Raise SnapshotError `snapshot.rights` with every point that is missing, or `snapshot.disk`
    where that is all."""
    if missing := [point for point in points if not point.ok]:
        detail = "; ".join(f"{point.name}: {point.detail}" for point in missing)
        remedy = "; ".join(dict.fromkeys(point.remedy for point in missing))
        lines = [f"{point.name}: {point.detail}" for point in missing]
        only_disk = [point.name for point in missing] == [_DISK]
        code = "snapshot.disk" if only_disk else "snapshot.rights"
        raise SnapshotError(code, detail, remedy, lines)


def require_room(folder: Path, size_bytes: int) -> None:
    """Given a folder that is there and bytes to be written, raise SnapshotError `snapshot.disk`
    where they leave the disk less than it has to keep."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < size_bytes + _SPARE_BYTES:
        needed = f"{_mib(size_bytes + _SPARE_BYTES)} needed"
        detail = f"{_mib(free_bytes)} MiB free in {folder}, {needed}"
        raise SnapshotError("snapshot.disk", detail, _ROOM)


def estimate_bytes(root_pid: int, proc: Path = pids.PROC) -> int:
    """Given a tree's root, return what its artifact will have at most: its private memory, what it
    swapped, and a tenth for all else. Mapped weights do not count: they are given back first."""
    total_kib = 0
    for process in pids.read_tree(root_pid, proc):
        status = _read_status(proc / str(process.pid) / "status")
        for name in ("RssAnon", "VmSwap"):
            total_kib += int(status.get(name, "0 kB").split()[0])
    return total_kib * 1024 * 11 // 10


def to_json(points: Sequence[Point]) -> dict[str, Any]:
    """Given points, return them as plain values with the verdict."""
    return {"ok": all(point.ok for point in points), "points": [asdict(point) for point in points]}


def render(points: Sequence[Point]) -> str:
    """Given points, return a line for each, with the remedy below what is missing."""
    lines = []
    for point in points:
        lines.append(f"{'ok     ' if point.ok else 'MISSING'} {point.name}: {point.detail}")
        if not point.ok:
            lines.append(f"        fix: {point.remedy}")
    return "\n".join(lines)


def _capability(mask: int, name: str) -> Point:
    there = bool(mask >> _CAPABILITIES[name] & 1)
    remedy = "" if there else f"compose.yaml: cap_add: [{name}]"
    return Point(f"CAP_{name}", there, f"for {_WHY[name]}", remedy)


def _seccomp(mode: int) -> Point:
    if mode == 0:
        return Point("seccomp", True, "the container has no filter")
    detail = "the container has a seccomp filter, which CRIU cannot suspend"
    return Point("seccomp", False, detail, "compose.yaml: security_opt: [seccomp=unconfined]")


def _criu(found: Found) -> list[Point]:
    remedy = "use the warmhold image: it brings its own criu"
    if not found.criu_version:
        return [Point("criu", False, found.criu_error, remedy)]
    numbers = tuple(int(part) for part in found.criu_version.split(".")[:2] if part.isdigit())
    recent = numbers >= _OLDEST_CRIU
    oldest = ".".join(map(str, _OLDEST_CRIU))
    detail = found.criu_version if recent else f"{found.criu_version} is older than {oldest}"
    works = not found.criu_error
    said = "the kernel has what criu needs" if works else found.criu_error
    kernel = "give the capabilities above; where they are there, use a newer kernel"
    return [
        Point("criu", recent, detail, "" if recent else remedy),
        Point("criu check", works, said, "" if works else kernel),
    ]


def _read_status(path: Path) -> dict[str, str]:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _mib(count: int) -> int:
    return -(-count // (1 << 20))
