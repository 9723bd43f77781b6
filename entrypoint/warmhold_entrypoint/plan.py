# SPDX-License-Identifier: Apache-2.0
"""The plan: which mode to try in which order, and for every other mode why not.

`decide` is pure: settings and facts in, plan out. It also holds the arithmetic that must be right
before anything starts: memory, shared memory, threads.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import Fault
from .facts import Facts
from .log import redact_argv
from .settings import MODES, Settings

GIB = 1 << 30
MIB = 1 << 20
# Private memory of the API server, EngineCore and one worker without weights and KV cache, and of
# each further worker. Measured on the demo model; see bench/NOTES.md.
BASE_BYTES = 2 * GIB
WORKER_BYTES = 1 * GIB
MIN_KV_BYTES = 256 * MIB
MAX_DEFAULT_KV_BYTES = 4 * GIB
# vLLM's message rings between its processes, in /dev/shm.
MIN_SHM_BYTES = 256 * MIB
MIN_STATE_BYTES = 256 * MIB


@dataclass(frozen=True)
class Attempt:
    """One rung of the ladder: a mode and the exact process that it starts."""

    mode: str
    argv: tuple[str, ...]


@dataclass(frozen=True)
class Rejection:
    """Why a mode is not used."""

    mode: str
    code: str
    detail: str
    remedy: str


@dataclass(frozen=True)
class Plan:
    """What a start will do. `environment` is added to the engine's own; secrets are in neither."""

    attempts: tuple[Attempt, ...]
    rejections: tuple[Rejection, ...]
    faults: tuple[Fault, ...]
    environment: Mapping[str, str]
    model: str
    model_directory: str | None
    cache_dir: str
    uid: int | None
    threads: int
    kv_cache_bytes: int | None

    def to_json(self) -> str:
        """Return the plan as JSON text, with secret arguments hidden."""
        shown = dataclasses.asdict(self)
        for attempt in shown["attempts"]:
            attempt["argv"] = redact_argv(attempt["argv"])
        return json.dumps(shown, indent=2)


def decide(settings: Settings, facts: Facts) -> Plan:
    """Given settings and facts, return the plan.

    The plan has a rejection for every mode that is not attempted before `disk`, and a fault for all
    that makes a start pointless (it then has no attempts). So is the rejection of a named mode.
    """
    wanted = settings.env.mode
    kv_bytes, memory_fault = choose_kv_bytes(settings, facts)
    faults = [*facts.faults, *_space_faults(settings, facts)]
    if memory_fault:
        faults.append(memory_fault)
    rejections = []
    attempts = []
    for mode in MODES:
        reason = _reason_against(mode, wanted)
        if reason is None:
            attempts.append(Attempt(mode, build_engine_argv(settings, facts, kv_bytes)))
        else:
            rejections.append(reason)
            if mode == wanted:
                faults.append(
                    Fault(
                        "mode.unavailable", f"{mode}: {reason.code}: {reason.detail}", reason.remedy
                    )
                )
    return Plan(
        attempts=() if faults else tuple(attempts),
        rejections=tuple(rejections),
        faults=tuple(faults),
        environment=build_engine_environment(settings, facts),
        model=settings.model,
        model_directory=facts.model.directory,
        cache_dir=facts.cache_dir,
        uid=settings.env.engine_uid,
        threads=choose_threads(settings, facts),
        kv_cache_bytes=kv_bytes,
    )


def _reason_against(mode: str, wanted: str) -> Rejection | None:
    """Tell why a mode is not used, or None where it is."""
    if wanted not in ("auto", mode):
        return Rejection(
            mode, f"{mode}.not-wanted", f"WARMHOLD_MODE={wanted}", "set WARMHOLD_MODE=auto"
        )
    if mode == "snapshot":
        return Rejection(
            mode,
            "snapshot.unsupported",
            "this version cannot make or restore snapshots",
            "use a version of warmhold with snapshots, or WARMHOLD_MODE=auto",
        )
    if mode == "ipc_cache":
        return Rejection(
            mode,
            "ipc_cache.unsupported",
            "this version keeps no weights resident",
            "use a version of warmhold with a weight cache, or WARMHOLD_MODE=auto",
        )
    return None


def choose_threads(settings: Settings, facts: Facts) -> int:
    """Return the CPU threads of each worker: its fair share of the CPUs that the cgroup allows."""
    return max(1, facts.cpus // settings.arguments.worker_count)


def choose_kv_bytes(settings: Settings, facts: Facts) -> tuple[int | None, Fault | None]:
    """Return the KV cache's bytes (None: vLLM's own choice) and a fault where they cannot fit.

    What the user set is kept. Else half of what weights and private memory leave, up to 4 GiB,
    since weights, KV cache and private memory are all charged to the same limit.
    """
    arguments = settings.arguments
    limit = facts.memory_limit_bytes
    fixed = facts.model.weight_bytes + BASE_BYTES + WORKER_BYTES * (arguments.worker_count - 1)
    explicit = _explicit_kv_bytes(settings)
    if explicit is None:
        kv_bytes = max(MIN_KV_BYTES, min(MAX_DEFAULT_KV_BYTES, (limit - fixed) // 2))
        kv_bytes -= kv_bytes % MIB
    else:
        kv_bytes = explicit
    if fixed + kv_bytes <= limit:
        delegated = arguments.has("--kv-cache-memory-bytes") or (
            explicit is None and arguments.has("--gpu-memory-utilization")
        )
        return (None if delegated else kv_bytes), None
    return kv_bytes, Fault(
        "memory.too-small",
        f"the model needs {_gib(fixed + kv_bytes)} (weights {_gib(facts.model.weight_bytes)},"
        f" KV cache {_gib(kv_bytes)}, processes {_gib(fixed - facts.model.weight_bytes)}),"
        f" the {facts.memory_limited_by} is {_gib(limit)}",
        "raise the memory limit (WARMHOLD_MEMORY), choose a smaller model, or lower"
        " WARMHOLD_KV_CACHE_GIB",
    )


def _explicit_kv_bytes(settings: Settings) -> int | None:
    text = settings.arguments.value("--kv-cache-memory-bytes")
    if text is not None:
        return int(text) if text.isascii() and text.isdigit() else None
    asked = settings.env.kv_cache_gib
    return None if asked is None else int(asked * GIB)


def _space_faults(settings: Settings, facts: Facts) -> list[Fault]:
    faults = []
    if facts.shm_free_bytes < MIN_SHM_BYTES:
        faults.append(
            Fault(
                "shm.too-small",
                f"/dev/shm has {facts.shm_free_bytes // MIB} MiB free of"
                f" {facts.shm_total_bytes // MIB}, vLLM's processes need {MIN_SHM_BYTES // MIB}",
                "set shm_size (WARMHOLD_SHM_SIZE=1g), docker run --shm-size 1g, or an emptyDir",
            )
        )
    if facts.state_free_bytes < MIN_STATE_BYTES:
        faults.append(
            Fault(
                "settings.state-full",
                f"{settings.env.state_dir} has {facts.state_free_bytes // MIB} MiB free,"
                f" compile caches need {MIN_STATE_BYTES // MIB}",
                "free some space, or mount a larger volume there",
            )
        )
    return faults


def build_engine_argv(settings: Settings, facts: Facts, kv_bytes: int | None) -> tuple[str, ...]:
    """Return the engine's argv: the user's own, byte-exact, then what is missing in it.

    The model's directory replaces `--model`; a single `--api-key` goes by the environment instead.
    """
    user = settings.arguments.without("--model").without("--revision")
    if len(settings.api_keys) == 1:
        user = user.without("--api-key")
    argv = ["vllm", "serve", facts.model.directory or settings.model, *user.argv]
    added = {
        "--served-model-name": settings.model,
        "--shutdown-timeout": str(settings.env.drain_s),
        "--disable-access-log-for-endpoints": "/health,/metrics",
    }
    if kv_bytes is not None:
        added["--kv-cache-memory-bytes"] = str(kv_bytes)
    for option, value in added.items():
        if not user.has(option):
            argv += [option, value]
    return tuple(argv)


def build_fetch_argv(settings: Settings) -> tuple[str, ...]:
    """Return the command that downloads the model into the cache, with progress."""
    revision = settings.arguments.value("--revision")
    chosen = ("--revision", revision) if revision else ()
    cache = str(settings.env.models_dir / "hub")
    return ("hf", "download", settings.model, *chosen, "--cache-dir", cache)


def build_engine_environment(settings: Settings, facts: Facts) -> dict[str, str]:
    """Return what is added to the engine's environment; a variable that the user set is kept.

    All caches lie in one folder of the state volume. Engines speak to themselves over loopback
    only, so that nothing in them is bound to this container's address.
    """
    cache = Path(facts.cache_dir)
    environment = {
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "FLASHINFER_WORKSPACE_BASE": str(cache / "flashinfer"),
        "XDG_CACHE_HOME": str(cache / "xdg"),
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_HOST_IP": "127.0.0.1",
        "MAX_JOBS": str(facts.cpus),
        "HF_HOME": str(settings.env.models_dir),
    }
    if facts.model.directory is not None:
        environment["HF_HUB_OFFLINE"] = "1"
    if facts.device.startswith("cpu"):
        # vLLM 0.32 saves ahead-of-time artifacts on a CPU and then fails to load them ("'function'
        # object has no attribute 'finalize_loading'"): every start would compile again. Without
        # them Inductor's own cache is used, and the second start compiles nothing.
        environment["VLLM_USE_AOT_COMPILE"] = "0"
    if facts.cpu_quota is not None and facts.cpu_quota < facts.cpu_affinity:
        # Upstream binds a thread to every core of the affinity mask and knows no quota.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        environment["OMP_NUM_THREADS"] = str(choose_threads(settings, facts))
    if settings.env.engine_uid:
        environment |= {"HOME": str(cache / "home"), "USER": "warmhold", "LOGNAME": "warmhold"}
    return environment


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB"
