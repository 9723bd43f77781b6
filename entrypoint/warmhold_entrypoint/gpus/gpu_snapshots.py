# SPDX-License-Identifier: Apache-2.0
"""Whether an engine on this GPU can be snapshotted, and what of the GPU a restore has to find.

Looks at what is given, and at a few files. Tried: one GPU, one worker, dense weights in 16 bits, on
x86-64. Whatever lies outside has its reason here, and a start goes on to the next mode.
"""

import json
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from warmhold_snapshot import cuda
from warmhold_snapshot.errors import SnapshotError

from ..arguments import EngineArguments
from ..settings import Settings
from ..weight_cache.weights import PLUGIN
from .gpu import Gpus

# As upstream's `vllm snapshot` names it.
PLUGIN_DIR = "CRIU_CUDA_PLUGIN_DIR"
_DEFAULT_PLUGIN_DIR = "/usr/local/lib/criu"
_MACHINE = "x86_64"
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_EXPANDABLE = re.compile(r"expandable_segments:\s*true", re.IGNORECASE)
_OTHER_MODE = "none: ipc_cache and disk start it as well"

Reason = tuple[str, str, str]  # code, detail, remedy


def find_plugins(settings: Settings) -> Path:
    """Given settings, return the folder of criu's plug-ins."""
    return Path(settings.environ.get(PLUGIN_DIR) or _DEFAULT_PLUGIN_DIR)


def find_gpu_obstacle(
    settings: Settings,
    gpus: Gpus,
    argv: Sequence[str],
    environment: Mapping[str, str],
    model_directory: str | None,
) -> Reason | None:
    """Given the GPUs and the engine that would be started, return code, detail and remedy of why
    there can be no snapshot of it; None where there can."""
    reasons = [
        *_about_engine(settings, argv, environment, model_directory),
        *_about_machine(gpus, find_plugins(settings)),
    ]
    return next(iter(reasons), None)


def identify(gpus: Gpus, plugins: Path) -> dict[str, str]:
    """Given the GPUs and the folder of plug-ins, return what has to be equal at a restore. Raise
    SnapshotError where the plug-in cannot be read."""
    (gpu,) = gpus.all
    try:
        digest = cuda.digest_plugin(plugins)
    except OSError as error:
        detail = f"{plugins / cuda.PLUGIN}: {error.strerror}"
        raise SnapshotError("snapshot.gpu", detail, "use the image warmhold:cuda") from error
    return {
        "uuid": gpu.uuid,
        "name": gpu.name,
        "memory_bytes": str(gpu.memory_bytes),
        "driver": gpus.driver,
        "plugin": digest,
    }


def _about_engine(
    settings: Settings,
    argv: Sequence[str],
    environment: Mapping[str, str],
    model_directory: str | None,
) -> Iterator[Reason]:
    code = "snapshot.unsupported"
    if (workers := settings.arguments.worker_count) > 1:
        detail = f"{workers} workers: a snapshot takes one GPU and one worker along"
        yield code, detail, _OTHER_MODE
    engine = EngineArguments(tuple(argv), settings.arguments.config)
    ours = engine.has("--enable-sleep-mode") and engine.value("--sleep-mode-backend") == PLUGIN
    if not ours:
        detail = "without the sleep mode `warmhold` an engine cannot give its GPU memory back"
        yield code, detail, "leave out what is said about sleep mode in the engine's arguments"
    for name in _ALLOCATOR:
        if _EXPANDABLE.search(environment.get(name, "")):
            detail = f"{name} has expandable_segments, which sleep mode cannot give back"
            yield code, detail, f"take it out of {name}"
    if found := _find_quantisation(engine, model_directory):
        yield code, f"{found}: not tried with weights below 16 bits", _OTHER_MODE


def _about_machine(gpus: Gpus, plugins: Path) -> Iterator[Reason]:
    code = "snapshot.gpu"
    if platform.machine() != _MACHINE:
        yield code, f"not tried on {platform.machine()}", _OTHER_MODE
    if len(gpus.all) > 1:
        detail = f"{len(gpus.all)} GPUs can be seen, and a snapshot takes one along"
        yield code, detail, "give the container one GPU, or set CUDA_VISIBLE_DEVICES to one UUID"
    if any(gpu.is_slice for gpu in gpus.all):
        yield code, "the GPU is a slice (MIG): not tried", _OTHER_MODE
    if not gpus.can_checkpoint:
        detail = f"driver {gpus.driver or 'of unknown version'} cannot checkpoint a process"
        yield code, detail, "install the NVIDIA driver 570 or newer on the host"
    if missing := cuda.find_missing(plugins):
        remedy = f"use the image warmhold:cuda, or set {PLUGIN_DIR}"
        yield code, f"criu cannot take CUDA along without {missing}", remedy


def _find_quantisation(engine: EngineArguments, model_directory: str | None) -> str:
    """What says that the weights are quantised, or ""."""
    if engine.has("--quantization"):
        return f"--quantization {engine.value('--quantization') or ''}".strip()
    with suppress(OSError, ValueError, TypeError):
        text = Path(model_directory or "", "config.json").read_text(encoding="utf-8")
        if dict(json.loads(text)).get("quantization_config"):
            return "quantization_config in config.json"
    return ""
