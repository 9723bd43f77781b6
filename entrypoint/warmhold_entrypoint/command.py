# SPDX-License-Identifier: Apache-2.0
"""The exact process that a start runs: the engine's argv and its environment."""

from collections.abc import Mapping
from pathlib import Path

from .budget import choose_threads
from .container.conf import CONTROL_SOCKET
from .facts import Facts
from .settings import HUB_TOKENS, Settings, is_offline
from .weight_cache import weights
from .weight_cache.backend import choose_backend

_FOR_DOWNLOADS = "--hf-token"
# A GPU engine gives weights and KV cache back by its sleep mode, for a snapshot too.
_SLEEP = ("--enable-sleep-mode", "--sleep-mode-backend", weights.PLUGIN)
_ABOUT_SLEEP = ("--enable-sleep-mode", "--no-enable-sleep-mode", "--sleep-mode-backend")
# A CPU's only worker has no process of its own: memory, start and snapshots are smaller by one.
_EXECUTOR = "warmhold_wcache.vllm_plugin.one_process.OneProcessExecutor"


def build_engine_argv(settings: Settings, facts: Facts, kv_bytes: int | None) -> tuple[str, ...]:
    """Return the engine's argv: the user's own, byte-exact, then what is missing in it.

    The model's directory replaces `--model`; a single `--api-key` goes by the environment instead,
    and a token for downloads is left out where there are none.
    """
    settings = weights.without_loader(settings)
    user = settings.arguments.without("--model").without("--revision")
    if len(settings.api_keys) == 1:
        user = user.without("--api-key")
    if is_offline({**settings.environ, **_choose_offline(settings, facts)}):
        user = user.without(_FOR_DOWNLOADS)
    argv = ["vllm", "serve", facts.model.directory or settings.model, *user.argv]
    added = {
        "--served-model-name": settings.model,
        "--shutdown-timeout": str(settings.env.drain_s),
        "--disable-access-log-for-endpoints": "/health,/metrics",
    }
    if kv_bytes is not None:
        added["--kv-cache-memory-bytes"] = str(kv_bytes)
    if not facts.on_gpu and settings.arguments.worker_count == 1:
        added["--distributed-executor-backend"] = _EXECUTOR
    for option, value in added.items():
        if not user.has(option):
            argv += [option, value]
    held = choose_backend(settings, facts.on_gpu) == "vllm"  # upstream forbids sleep mode then
    if facts.on_gpu and not held and uses_own_sleep(settings):
        argv += _SLEEP
    return tuple(argv)


def uses_own_sleep(settings: Settings) -> bool:
    """Given settings, tell whether an engine on one GPU gets warmhold's sleep mode: the user's own
    words about it are left as they are."""
    arguments = settings.arguments
    said = any(arguments.has(option) for option in _ABOUT_SLEEP)
    return not said and arguments.worker_count == 1 and weights.uses_loader(settings)


def build_fetch_argv(settings: Settings) -> tuple[str, ...]:
    """Return the command that downloads the model into the cache, with progress."""
    revision = settings.arguments.value("--revision")
    chosen = ("--revision", revision) if revision else ()
    cache = str(settings.env.models_dir / "hub")
    return ("hf", "download", settings.model, *chosen, "--cache-dir", cache)


def build_engine_environment(settings: Settings, facts: Facts) -> dict[str, str]:
    """Return what is set in the engine's environment; a variable that the user set is kept.

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
    if facts.device.startswith("cpu"):
        # vLLM 0.32 saves ahead-of-time artifacts on a CPU and then fails to load them ("'function'
        # object has no attribute 'finalize_loading'"): every start would compile again. Without
        # them Inductor's own cache is used, and the second start compiles nothing.
        environment["VLLM_USE_AOT_COMPILE"] = "0"
    if facts.on_gpu:
        if settings.arguments.worker_count == 1:
            # Alone it speaks to nobody, and an adapter that is held open cannot be snapshotted.
            environment["NCCL_IB_DISABLE"] = "1"
    elif _is_limited(facts) or settings.arguments.worker_count > facts.numa_nodes:
        # Upstream binds a thread to every core of the affinity mask and knows no quota; and it
        # gives each worker a NUMA node of its own, and ends where there are too few.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        environment["OMP_NUM_THREADS"] = str(choose_threads(settings, facts))
    environment = {
        name: value for name, value in environment.items() if name not in settings.environ
    }
    environment |= _choose_offline(settings, facts)
    # A list of plug-ins is a filter: without ours in it there is no loader.
    chosen = settings.environ.get("VLLM_PLUGINS")
    plugins = [*(facts.plugins if chosen is None else chosen.split(","))]
    environment["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*plugins, weights.PLUGIN]))
    environment["WARMHOLD_CONTROL_SOCKET"] = str(settings.env.run_dir / CONTROL_SOCKET)
    if settings.env.engine_uid:
        environment |= {"HOME": str(cache / "home"), "USER": "warmhold", "LOGNAME": "warmhold"}
    return environment


def inherit_environment(settings: Settings, added: Mapping[str, str]) -> dict[str, str]:
    """Given settings and what the plan adds, return the whole environment of an engine.

    An engine that downloads nothing gets no token for it: snapshots hold all of its memory. A
    download gets that of `--hf-token` too.
    """
    environment = {**settings.environ, **added}
    if is_offline(environment):
        for name in HUB_TOKENS:
            environment.pop(name, None)
    elif token := settings.arguments.value(_FOR_DOWNLOADS):
        environment[HUB_TOKENS[0]] = token
    if len(settings.api_keys) == 1:
        environment["VLLM_API_KEY"] = settings.api_keys[0]
    return environment


def _is_limited(facts: Facts) -> bool:
    return facts.cpu_quota is not None and facts.cpu_quota < facts.cpu_affinity


def _choose_offline(settings: Settings, facts: Facts) -> dict[str, str]:
    """What keeps an engine whose model is there from asking the hub, unless the user said what it
    is to do; a variable that is empty, as compose files leave it, says nothing."""
    there = facts.model.directory is not None
    return {"HF_HUB_OFFLINE": "1"} if there and not settings.environ.get("HF_HUB_OFFLINE") else {}
