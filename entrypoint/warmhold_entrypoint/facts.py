# SPDX-License-Identifier: Apache-2.0
"""Facts: what this machine and container are like right now. Reads only, within milliseconds.

Nothing here decides: `plan.decide` does. Paths below /proc, /sys and /opt are fixed by the kernel
and the image; those of the user come from the settings.
"""

import hashlib
import math
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from warmhold_wcache.content import Content, read_cached_content

from . import launcher
from .container.conf import VAULT_SOCKET
from .errors import Fault
from .gpus.gpu import Gpus, find_gpu_fault, is_rocm, read_gpus
from .model import Model, find_model
from .running import tree
from .settings import Settings
from .snapshot_mode.snapshots import Snapshots
from .weight_cache import weights
from .weight_cache.backend import choose_backend
from .weight_cache.resident import Vault, read_vault

BUILD_ID_FILE = Path("/opt/warmhold/build-id")
_CGROUP = Path("/sys/fs/cgroup")
_SHM = Path("/dev/shm")
_NODES = Path("/sys/devices/system/node")
# Those add routes to the public server: upstream loads none that is not named, so neither do we.
_ENDPOINTS = "vllm.endpoint_plugins"
_DIST_INFO = ".dist-info"


@dataclass(frozen=True)
class Facts:
    """What was found. Sizes in bytes; `memory_limit_bytes` is the lower of host and cgroup."""

    build_id: str
    vllm_version: str
    device: str
    cpu_quota: float | None
    cpu_affinity: int
    numa_nodes: int
    memory_limit_bytes: int
    memory_limited_by: str
    shm_total_bytes: int
    shm_free_bytes: int
    state_free_bytes: int
    has_caches: bool  # something was compiled for this engine before
    model: Model
    content: Content
    vault: Vault
    plugins: tuple[str, ...]
    packages: tuple[str, ...]
    cache_dir: str
    faults: tuple[Fault, ...]
    gpus: Gpus = field(default_factory=Gpus)
    rocm: bool = False
    # Read last, since it is compared with what would be started.
    snapshots: Snapshots = field(default_factory=Snapshots)

    @property
    def on_gpu(self) -> bool:
        """Whether the engine computes on an NVIDIA GPU."""
        return bool(self.gpus.all)

    @property
    def versions(self) -> dict[str, str]:
        """What was installed, by name."""
        return {"vllm": self.vllm_version, "build": self.build_id}

    @property
    def cpus(self) -> int:
        """Whole CPUs that the cgroup and the affinity mask leave us, at least one."""
        quota = math.inf if self.cpu_quota is None else self.cpu_quota
        return max(1, int(min(quota, self.cpu_affinity)))


def read_facts(settings: Settings) -> Facts:
    """Given settings, return the facts; what is unusable (paths, port, model) is in `faults`."""
    env = settings.env
    model, faults = find_model(
        settings.model, settings.arguments.value("--revision"), env.models_dir, settings.offline
    )
    build_id, vllm_version = read_build_id(), read_vllm_version()
    gpus = read_gpus(vllm_version, env.run_dir)
    on_gpu = bool(gpus.all)
    device = gpus.device if on_gpu else read_cpu_device()
    # What is compiled depends on the linear path, and vLLM's own hash does not know of it.
    parts = [build_id, vllm_version, device, weights.linear_path(settings, on_gpu)]
    cache_dir = env.state_dir / "cache" / "-".join(filter(None, parts))
    limit, limited_by = read_memory_limit()
    uid = os.getuid() if env.engine_uid is None else env.engine_uid
    plugins, packages = read_packages()
    asks = choose_backend(settings, on_gpu) == "vault"
    no_vault = Vault("off", f"WARMHOLD_WCACHE={env.wcache}")
    faults += probe_access(uid, cache_dir, model)
    if not settings.arguments.value("--uds"):  # with it the engine listens on no port
        faults += probe_port(settings.arguments.port)
    faults += find_gpu_fault(gpus, vllm_version, packages)
    return Facts(
        build_id=build_id,
        vllm_version=vllm_version,
        device=device,
        cpu_quota=read_cpu_quota(),
        cpu_affinity=len(os.sched_getaffinity(0)),
        numa_nodes=max(1, len(list(_NODES.glob("node[0-9]*")))),
        memory_limit_bytes=limit,
        memory_limited_by=limited_by,
        shm_total_bytes=_disk(_SHM)[0],
        shm_free_bytes=_disk(_SHM)[1],
        state_free_bytes=_disk(_existing(env.state_dir))[1],
        has_caches=_has_caches(cache_dir),
        model=model,
        content=_read_content(model, weights.digests_folder(settings)),
        vault=read_vault(env.run_dir / VAULT_SOCKET) if asks else no_vault,
        plugins=plugins,
        packages=packages,
        cache_dir=str(cache_dir),
        faults=tuple(faults),
        gpus=gpus,
        rocm=is_rocm(vllm_version),
    )


def read_build_id() -> str:
    """Return the image's build id, or `source` outside an image."""
    try:
        return BUILD_ID_FILE.read_text(encoding="ascii").strip()
    except OSError:
        return "source"


def read_vllm_version() -> str:
    """Return the installed vLLM's version without importing it, or `none`.

    Read off the name of its folder: importlib.metadata would cost a start 20 ms.
    """
    for folder in sys.path:
        for found in Path(folder).glob("vllm-*.dist-info"):
            return found.name.removeprefix("vllm-").removesuffix(".dist-info")
    return "none"


def read_packages() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the vLLM plug-ins that are installed, as upstream finds them, and name
    and version of every distribution; both sorted.

    A plug-in's code may be another one in the same version, so that a digest of its record, which
    lists every file with its own, is added. Read off the files: importlib.metadata would cost a
    start 20 ms.
    """
    plugins, packages = set(), set()
    for folder in sys.path:
        try:
            with os.scandir(folder or ".") as entries:
                names = [entry.name for entry in entries if entry.name.endswith(_DIST_INFO)]
        except OSError:  # an archive, or a folder that is not there
            continue
        for name in names:
            place = Path(folder, name)
            found = _read_plugins(place / "entry_points.txt")
            plugins |= found
            package = name.removesuffix(_DIST_INFO)
            if found:
                with suppress(OSError):
                    record = hashlib.sha256((place / "RECORD").read_bytes())
                    package = f"{package}:{record.hexdigest()[:16]}"
            packages.add(package)
    return tuple(sorted(plugins)), tuple(sorted(packages))


def _read_plugins(path: Path) -> set[str]:
    """The plug-ins among a distribution's entry points; most distributions have none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    names = set()
    group = ""
    for line in text.splitlines():
        if line.startswith("["):
            group = line.strip("[] ")
        elif "=" in line and group.startswith("vllm.") and group != _ENDPOINTS:
            names.add(line.partition("=")[0].strip())
    return names


def read_cpu_device() -> str:
    """Return `cpu-` and a digest of this CPU's model and flags: compiled code depends on both."""
    kept = {"model name", "flags", "Features", "CPU part"}
    seen: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in kept:
                seen.setdefault(name.strip(), value.strip())
            elif not line and seen:
                break
    return "cpu-" + hashlib.sha256(repr(sorted(seen.items())).encode()).hexdigest()[:8]


def read_cpu_quota() -> float | None:
    """Return the CPUs that the cgroup allows, or None where it sets no limit (v2, then v1)."""
    words = _read_words(_CGROUP / "cpu.max")
    if not words:
        quota = _read_words(_CGROUP / "cpu/cpu.cfs_quota_us")
        words = quota + _read_words(_CGROUP / "cpu/cpu.cfs_period_us")
    if len(words) != 2 or words[0] in {"max", "-1"}:
        return None
    return int(words[0]) / int(words[1])


def read_memory_limit() -> tuple[int, str]:
    """Return the lower of the host's memory and the cgroup's limit in bytes, and which it is."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in (_CGROUP / "memory.max", _CGROUP / "memory/memory.limit_in_bytes"):
        words = _read_words(path)
        if words and words[0].isdigit() and int(words[0]) < host:
            return int(words[0]), "cgroup limit"
    return host, "host memory"


def read_oom_kills() -> int:
    """Return how many processes of this cgroup were killed for memory so far."""
    for path in (_CGROUP / "memory.events", _CGROUP / "memory/memory.oom_control"):
        words = _read_words(path)
        if "oom_kill" in words:
            return int(words[words.index("oom_kill") + 1])
    return 0


def probe_access(uid: int, cache_dir: Path, model: Model) -> list[Fault]:
    """Given the engine's uid, return a fault for each path that it could not use.

    The engine holds no capability, so root's usual freedom does not count: the question is asked
    by a child process that gave up its rights just as the engine does.
    """
    parent = _existing(cache_dir)
    faults = []
    # The folders that are still missing are made by warmhold itself, with its own rights.
    ours = parent if parent != cache_dir else parent.parent
    if not os.access(ours, os.W_OK | os.X_OK):
        faults.append(_access_fault(ours, "writable", os.getuid()))
    mode = os.X_OK if parent != cache_dir else os.W_OK | os.X_OK
    questions = [(parent, mode, "writable" if mode & os.W_OK else "reachable")]
    if model.directory is not None:
        folder = Path(model.directory)
        questions.append((folder, os.R_OK | os.X_OK, "readable"))
        questions += [
            (file, os.R_OK, "readable") for file in sorted(folder.glob("*")) if file.is_file()
        ]
    answers = _ask_as_engine(uid, [(path, wanted) for path, wanted, _ in questions])
    if answers is None:
        faults.append(
            Fault(
                "rights.engine-uid",
                f"this container may not start the engine as uid {uid}",
                "unset WARMHOLD_ENGINE_UID, or give the container CAP_SETUID and CAP_SETGID",
            )
        )
        return faults
    refused = [
        (path, word)
        for (path, _, word), granted in zip(questions, answers, strict=True)
        if not granted
    ]
    faults += [_access_fault(path, word, uid) for path, word in refused[:3]]
    return faults


def probe_port(port: int) -> list[Fault]:
    """Given the engine's port, return a fault that names the holder, where it is taken.

    An engine of ours that still serves is no fault: it is ended before the next one starts.
    """
    if port == 0:
        return []
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))  # noqa: S104 - the engine binds the wildcard too
            probe.listen()
        except PermissionError:
            return [
                Fault(
                    "rights.port",
                    f"port {port} may not be bound by uid {os.getuid()}",
                    "choose a port above 1023 with --port",
                )
            ]
        except OSError:
            holder = find_port_holder(port)
            if holder is not None and holder in tree.find_members():
                return []
            who = (
                f"{holder.name} (PID {holder.pid})"
                if holder
                else "a process outside this container"
            )
            return [
                Fault(
                    "port.taken",
                    f"port {port} is held by {who}",
                    "end that process, or choose another port with --port",
                )
            ]
    return []


def find_port_holder(port: int) -> tree.Process | None:
    """Given a TCP port, return the process of this PID namespace that listens on it, or None."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/net", table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            for link in (folder / "fd").iterdir():
                if str(link.readlink()) in inodes:
                    return tree.read_process(int(folder.name))
    return None


def _read_content(model: Model, digests: Path) -> Content:
    """The checkpoint's identity as far as it is known without reading a weight file."""
    with suppress(OSError):
        if model.directory is not None:
            return read_cached_content(Path(model.directory), digests)
    return Content("", ())


def _ask_as_engine(uid: int, questions: Sequence[tuple[Path, int]]) -> list[bool] | None:
    """Answer access(2) questions in a child without rights; None where it cannot become the uid."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            launcher.drop_rights(uid, tree.ENGINE_GROUP, launcher.load_libc())
            os.write(writer, bytes(os.access(path, mode) for path, mode in questions))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answers = pipe.read()
    os.waitpid(pid, 0)
    return [bool(answer) for answer in answers] if len(answers) == len(questions) else None


def _access_fault(path: Path, word: str, uid: int) -> Fault:
    try:
        status = path.stat()
        found = f"owner {status.st_uid}, mode {status.st_mode & 0o7777:04o}"
    except OSError as error:
        found = str(error.strerror)
    remedy = f"chown it to uid {uid}, or mount a volume that uid {uid} may use"
    return Fault(
        f"rights.not-{word}",
        f"{path} is not {word} for uid {uid} without capabilities ({found})",
        remedy,
    )


def _existing(path: Path) -> Path:
    """The path itself or its nearest ancestor that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _has_caches(folder: Path) -> bool:
    with suppress(OSError):
        return any(entry.name != "home" for entry in folder.iterdir())
    return False


def _disk(path: Path) -> tuple[int, int]:
    """Total and free bytes of the file system at a path; zeros where there is none."""
    try:
        status = os.statvfs(path)
    except OSError:
        return 0, 0
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except OSError:
        return []
