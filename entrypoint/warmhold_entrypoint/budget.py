# SPDX-License-Identifier: Apache-2.0
"""The arithmetic that must be right before anything starts: memory, disk space and threads."""

from .arguments import read_bytes
from .errors import Fault
from .facts import Facts
from .settings import Settings

GIB = 1 << 30
MIB = 1 << 20
# Private memory of the API server, EngineCore and one worker without weights and KV cache, and of
# each further worker. Measured on the demo model; see bench/NOTES.md.
BASE_BYTES = 2 * GIB
WORKER_BYTES = 1 * GIB
MIN_KV_BYTES = 256 * MIB
MAX_DEFAULT_KV_BYTES = 4 * GIB
# On a CPU vLLM gives this one (in GiB) the last word: vllm/platforms/cpu.py.
_KV_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
# vLLM's message rings between its processes, in /dev/shm.
MIN_SHM_BYTES = 256 * MIB
MIN_STATE_BYTES = 256 * MIB


def choose_threads(settings: Settings, facts: Facts) -> int:
    """Return the CPU threads of each worker: its fair share of the CPUs that the cgroup allows."""
    return max(1, facts.cpus // settings.arguments.worker_count)


def choose_kv_bytes(
    settings: Settings, facts: Facts, resident_bytes: int = 0
) -> tuple[int | None, Fault | None]:
    """Return the KV cache's bytes (None: vLLM's own choice) and a fault where they cannot fit.

    `resident_bytes` is what the vault holds besides one copy of the model's weights. What the user
    set is kept. Else half of what weights and private memory leave, up to 4 GiB, since weights,
    resident or not, KV cache and private memory are all charged to the same limit. On a GPU vLLM
    measures what is left there, with resident weights counted once.
    """
    if facts.on_gpu:
        return None, None
    arguments = settings.arguments
    limit = facts.memory_limit_bytes
    processes = BASE_BYTES + WORKER_BYTES * (arguments.worker_count - 1)
    fixed = facts.model.weight_bytes + resident_bytes + processes
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
    resident = f", other resident weights {_gib(resident_bytes)}" if resident_bytes else ""
    return kv_bytes, Fault(
        "memory.too-small",
        f"the model needs {_gib(fixed + kv_bytes)} (weights {_gib(facts.model.weight_bytes)},"
        f" KV cache {_gib(kv_bytes)}, processes {_gib(processes)}{resident}),"
        f" the {facts.memory_limited_by} is {_gib(limit)}",
        "raise the memory limit (WARMHOLD_MEMORY), choose a smaller model, or lower"
        " WARMHOLD_KV_CACHE_GIB" + (", or drop what `wcache status` shows" if resident else ""),
    )


def _explicit_kv_bytes(settings: Settings) -> int | None:
    space = settings.environ.get(_KV_VARIABLE, "")
    if space.isascii() and space.isdigit():
        return int(space) * GIB
    text = settings.arguments.value("--kv-cache-memory-bytes")
    if text is not None:
        return read_bytes(text)
    asked = settings.env.kv_cache_gib
    return None if asked is None else int(asked * GIB)


def space_faults(settings: Settings, facts: Facts) -> list[Fault]:
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
    if facts.state_free_bytes < MIN_STATE_BYTES and not facts.has_caches:
        faults.append(
            Fault(
                "settings.state-full",
                f"{settings.env.state_dir} has {facts.state_free_bytes // MIB} MiB free,"
                f" compile caches need {MIN_STATE_BYTES // MIB}",
                "free some space, or mount a larger volume there",
            )
        )
    return faults


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB"
