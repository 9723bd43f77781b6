# SPDX-License-Identifier: Apache-2.0
"""Who keeps the weights resident: warmhold's vault, or upstream's `vllm preload`.

Pure: settings and what is known of the machine in, a choice, a reason or an argv out. The vault has
one GPU's weights or a CPU's; upstream's processes, the holder, have one process for each GPU, and
share by CUDA IPC. That memory cannot be checkpointed, so there is no snapshot beside it.
Source: vLLM 0.33's entrypoints/cli/preload.py, model_loader/weight_cache/{daemon,ipc_loader}.py.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..arguments import EngineArguments
from ..errors import Rejection
from ..settings import Settings

Backend = Literal["vault", "vllm", "off"]

FORMAT = "--load-format"
EXTRA = "--model-loader-extra-config"
IPC_FORMAT = "ipc_cache"
# The keys of upstream's ipc_cache loader; it refuses any other, which are then the holder's own.
_WAITS = ("connect_timeout_s", "state_timeout_s")
_IPC_KEYS = (*_WAITS, "mode", "fallback", "socket_path", "socket_dir")
_MASTER_PORT = "--weight-cache-master-port"
_SOCKET_DIR = "--weight-cache-socket-dir"
_HEALTH_HOST = "--weight-cache-health-host"
_HEALTH_PORT = "--weight-cache-health-port"
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_EXPANDABLE = re.compile(r"expandable_segments:\s*true", re.IGNORECASE)
# Upstream's preload has no process for ranks of this kind.
_CONTEXT = "--prefill-context-parallel-size"
_PIPELINES_SINCE = (0, 33)
# A socket's path has 107 letters at most.
_MAX_FOLDER = 107 - len(f"/vllm_weight_cache_{'0' * 32}_draft.sock")
_VAULT = "set WARMHOLD_WCACHE=vault"
# What `vllm serve` takes and `vllm preload` does not. Source: FrontendArgs, make_arg_parser and
# AsyncEngineArgs of vLLM 0.33. Sleep mode and the weights' source are the engine's alone.
SERVER_ONLY = frozenset(
    f"--{name}"
    for name in """
    allow-credentials allowed-headers allowed-methods allowed-origins
    anthropic-disabled-thinking-effort api-key api-server-count chat-template
    chat-template-content-format cohere-format cohere-is-reasoning-model config
    data-parallel-supervisor-port default-chat-template-kwargs disable-access-log-for-endpoints
    disable-auto-tool-choice disable-fastapi-docs disable-flash-late-interaction
    disable-force-include-usage disable-log-deltas disable-log-outputs disable-log-requests
    disable-offline-docs disable-per-request-metrics disable-prompt-tokens-details
    disable-request-id-headers disable-scale-out disable-server-load-tracking
    disable-ssl-refresh disable-tokenizer-info-endpoint disable-uvicorn-access-log
    dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s
    dp-supervisor-probe-timeout-s enable-auto-tool-choice enable-fastapi-docs
    enable-flash-late-interaction enable-force-include-usage enable-log-deltas
    enable-log-outputs enable-log-requests enable-offline-docs enable-per-request-metrics
    enable-prompt-tokens-details enable-request-id-headers enable-scale-out
    enable-server-load-tracking enable-ssl-refresh enable-tokenizer-info-endpoint
    enable-uvicorn-access-log exclude-tools-when-tool-choice-none fingerprint-mode
    fingerprint-value grpc grpc-port h11-max-header-count h11-max-incomplete-event-size headless
    host log-error-stack lora-modules max-log-len middleware port reasoning-effort-map
    response-role return-tokens-as-token-ids root-path sse-keep-alive-interval ssl-ca-certs
    ssl-cert-reqs ssl-certfile ssl-ciphers ssl-keyfile tokens-only tool-call-parser
    tool-parser-plugin tool-server tool-strict-level trust-request-chat-template
    trust-request-mm-kwargs uds uvicorn-log-level
    """.split()  # noqa: SIM905
)
_NOT_HELD = ("--model", "--revision", "--hf-token", "--enable-sleep-mode", "--sleep-mode-backend")


def choose_backend(settings: Settings, on_gpu: bool) -> Backend:
    """Given settings and whether a GPU computes, return who keeps the weights."""
    asked = settings.env.wcache
    if asked != "auto":
        return asked
    arguments = settings.arguments
    shared = (
        arguments.worker_count > 1
        or arguments.has("--enable-expert-parallel")
        or bool(arguments.elsewhere)
        or has_draft_model(arguments)
    )
    return "vllm" if on_gpu and shared and arguments.count(_CONTEXT) == 1 else "vault"


def has_draft_model(arguments: EngineArguments) -> bool:
    """Given the engine's arguments, tell whether a model drafts: n-grams and suffixes need none."""
    method, model = arguments.value("--spec-method"), arguments.value("--spec-model")
    for name, values in arguments.options():
        text = values[-1] if values else ""
        if name == "--speculative-config":
            given = _read_object(text)
            method, model = given.get("method", method), given.get("model", model)
        elif name == "--speculative-config.method":
            method = text
        elif name == "--speculative-config.model":
            model = text
    return method not in ("ngram", "ngram_gpu", "suffix", "custom") and bool(method or model)


def find_obstacle(
    settings: Settings, environment: Mapping[str, str], on_gpu: bool, rocm: bool, version: str
) -> Rejection | None:
    """Given settings, the engine's environment, whether an NVIDIA GPU or ROCm computes, and vLLM's
    version, return why upstream's holder cannot be used; None where it can."""
    arguments, more = settings.arguments, preload_arguments(settings)
    if rocm:
        detail = "WARMHOLD_WCACHE=vllm on ROCm: not tried, so refused"
        return _unsupported(detail, "set WARMHOLD_WCACHE=off, or use an NVIDIA GPU")
    if not on_gpu:
        detail = "WARMHOLD_WCACHE=vllm shares by CUDA IPC, and no NVIDIA GPU computes here"
        return _unsupported(detail, _VAULT)
    if any(name.startswith(EXTRA + ".") for name, _ in arguments.options()):
        return _unsupported(f"{EXTRA} in parts (with a dot)", "give it as one JSON object")
    if _given_extra(settings).get("mode", "zero_copy") != "zero_copy":
        detail = "mode copy: the engine would have the holder give its weights up"
        return _unsupported(detail, f"leave mode out of {EXTRA}")
    for name in _ALLOCATOR:
        if _EXPANDABLE.search(environment.get(name, "")):
            detail = f"{name} has expandable_segments, which CUDA IPC cannot share"
            return _unsupported(detail, f"take it out of {name}")
    if arguments.count("--pipeline-parallel-size") > 1 and _numbers(version) < _PIPELINES_SINCE:
        detail = f"vLLM {version}'s preload takes no --pipeline-parallel-size; 0.33's does"
        return _unsupported(detail, "use vLLM 0.33 or newer, or tensor parallelism")
    if arguments.count(_CONTEXT) > 1:
        return _unsupported(f"`vllm preload` knows no {_CONTEXT}", _VAULT)
    if len(folder := socket_dir(settings)) > _MAX_FOLDER:
        detail = f"a path in {folder} is too long for a socket's"
        return _unsupported(detail, f"give a {_SOCKET_DIR} of at most {_MAX_FOLDER} letters")
    if spans_nodes(arguments) and not more.has(_MASTER_PORT):
        detail = f"the holder spans nodes, and WARMHOLD_PRELOAD_ARGS has no {_MASTER_PORT}"
        return _unsupported(detail, "give one, the same on every node and not the engine's own")
    return None


def spans_nodes(arguments: EngineArguments) -> bool:
    """Given the engine's arguments, tell whether other nodes have GPUs of it."""
    ranks = arguments.count("--data-parallel-size")
    local = arguments.count("--data-parallel-size-local", ranks)
    return arguments.count("--nnodes") > 1 or local < ranks


def count_local_ranks(arguments: EngineArguments) -> int:
    """Given the engine's arguments, return how many GPUs of it this node has."""
    in_one = arguments.count("--tensor-parallel-size") * arguments.count("--pipeline-parallel-size")
    in_one *= arguments.count(_CONTEXT)
    ranks = arguments.count("--data-parallel-size")
    nodes = arguments.count("--nnodes")
    if nodes > 1:
        return max(1, ranks * in_one // nodes)
    return arguments.count("--data-parallel-size-local", ranks) * in_one


def preload_arguments(settings: Settings) -> EngineArguments:
    """Given settings, return WARMHOLD_PRELOAD_ARGS as arguments; none where it cannot be split,
    which is a fault of the settings."""
    try:
        return EngineArguments(tuple(shlex.split(settings.env.preload_args)))
    except ValueError:
        return EngineArguments()


def socket_dir(settings: Settings) -> str:
    """Given settings, return the folder of the holder's sockets."""
    given = preload_arguments(settings).value(_SOCKET_DIR)
    return given or str(settings.env.run_dir / "holder")


def health_address(settings: Settings, free_port: int) -> tuple[str, int]:
    """Given settings and a port that is free, return where the holder's /health is asked."""
    more = preload_arguments(settings)
    host = more.value(_HEALTH_HOST) or ""
    everywhere = host in ("", "0.0.0.0", "::")  # noqa: S104 - compared, not bound
    return "127.0.0.1" if everywhere else host, more.count(_HEALTH_PORT, free_port)


def build_holder_argv(settings: Settings, model: str, free_port: int) -> tuple[str, ...]:
    """Given settings, the model's folder and a port that is free, return upstream's preload: the
    engine's own arguments but for the server's, then what WARMHOLD_PRELOAD_ARGS says."""
    arguments = settings.arguments
    dropped = {*SERVER_ONLY, *(f"--no-{name[2:]}" for name in SERVER_ONLY), *_NOT_HELD, EXTRA}
    if arguments.value(FORMAT) == IPC_FORMAT:
        dropped.add(FORMAT)
    argv = ["vllm", "preload", "--model", model, *arguments.words(dropped)]
    if own := {k: v for k, v in _given_extra(settings).items() if k not in _IPC_KEYS}:
        argv += [EXTRA, json.dumps(own)]
    more = preload_arguments(settings)
    added = {
        _SOCKET_DIR: socket_dir(settings),
        _HEALTH_HOST: "127.0.0.1",  # upstream's default is every address
        _HEALTH_PORT: str(free_port),
    }
    for option, value in added.items():
        if not more.has(option):
            argv += [option, value]
    return (*argv, *more.argv)


def add_ipc_loader(settings: Settings, argv: Sequence[str]) -> tuple[str, ...]:
    """Given the engine's argv, return it with upstream's loader of held weights. It never falls
    back to the disk by itself: that would be a second copy on the GPU, and told nowhere."""
    given = {k: v for k, v in _given_extra(settings).items() if k in _WAITS}
    extra = {**given, "fallback": False, "socket_dir": socket_dir(settings)}
    return (*argv, FORMAT, IPC_FORMAT, EXTRA, json.dumps(extra))


def add_disk_loader(settings: Settings, argv: Sequence[str]) -> tuple[str, ...]:
    """Given the engine's argv, return it with the loader that the user chose, for weights that
    nobody holds."""
    chosen = settings.arguments.value(FORMAT)
    if chosen and chosen != IPC_FORMAT and FORMAT not in argv:
        argv = (*argv, FORMAT, chosen)
    own = {k: v for k, v in _given_extra(settings).items() if k not in _IPC_KEYS}
    return (*argv, EXTRA, json.dumps(own)) if own else tuple(argv)


def _given_extra(settings: Settings) -> dict[str, Any]:
    return _read_object(settings.arguments.value(EXTRA) or "")


def _read_object(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text)) if text else {}
    except (ValueError, TypeError):
        return {}  # told as a fault of its own, or by vLLM


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _unsupported(detail: str, remedy: str) -> Rejection:
    return Rejection("ipc_cache", "ipc_cache.unsupported", detail, remedy)
