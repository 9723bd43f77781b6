# SPDX-License-Identifier: Apache-2.0
"""Which generation a load asks for: its exact key, and the memory in which it lies.

Reads the checkpoint where nobody knows its content yet, and fetches one that is not here.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform

from warmhold_wcache.client import VaultClient
from warmhold_wcache.content import Content, ContentError, compute_content, read_versions
from warmhold_wcache.errors import WcacheError
from warmhold_wcache.spare import find_spare, find_superseded
from warmhold_wcache.vllm_plugin.cpu_linear import CpuLinear, describe_cpu_linear
from warmhold_wcache.vllm_plugin.exact_key import build_exact_key
from warmhold_wcache.vllm_plugin.memory import Memory, find_memory
from warmhold_wcache.vllm_plugin.options import Options, Source
from warmhold_wcache.vllm_plugin.outcome import Outcome

logger = init_logger("vllm.warmhold")

_STAGE = "loaded"
_PROGRESS_EVERY_S = 5.0
_BACK_S, _BACK_POLL_S = 2.0, 0.02


@dataclass(frozen=True)
class Wanted:
    """What a load asks the vault for, and publishes; `folder` has the checkpoint."""

    memory: Memory
    key: dict[str, str]
    content: Content
    folder: Path


def find_wanted(
    vllm_config: Any,
    model_config: Any,
    device: torch.device,
    options: Options,
    disk: Any,
    outcome: Outcome,
) -> Wanted | None:
    """Given a rank's configuration, its device, the settings and vLLM's loader for the checkpoint,
    return what to ask the vault for; None, with the reason in the outcome, where there is nothing.
    """
    try:
        memory = find_memory(device)
    except WcacheError as error:
        outcome.miss(error.code, error.detail, warn=True)
        return None
    if memory is None:
        outcome.miss("wcache.unsupported", "the vault does not serve this device type")
        return None
    if getattr(vllm_config.parallel_config, "enable_eplb", False):
        outcome.miss("wcache.unsupported", "experts are moved at run time (EPLB)")
        return None
    if options.disk_format == "dummy":
        outcome.miss("wcache.unsupported", "dummy weights have no content")
        return None
    try:
        with outcome.phase("content"):
            folder = _find_folder(model_config, disk)
            content = compute_content(folder, options.digests, _log_progress())
    except (ContentError, OSError) as error:
        outcome.miss("wcache.unsupported", f"no content identity: {error}", warn=True)
        return None
    linear = CpuLinear(options.cpu_linear) if current_platform.is_cpu() else None
    key = build_exact_key(
        vllm_config,
        model_config,
        content,
        device=memory.device,
        stage=_STAGE,
        cpu_linear="" if linear is None else describe_cpu_linear(linear),
        disk_format=options.disk_format,
    )
    return Wanted(memory, key, content, folder)


def read_external_bytes(vllm_config: Any, device: torch.device, options: Options, disk: Any) -> int:
    """Given a rank's configuration before it loads, return how many bytes of its GPU's memory hold
    already what it is going to map: its models' generations, which the vault has. Where the KV
    cache's size is given the share of the GPU sizes nothing, and vLLM would still end where weights
    alone exceed it: at most one byte less than the share then.

    vLLM measures the GPU next. What a publish would supersede is given up before, since it would
    be taken for the KV cache's room later; and so is all else there that nobody uses, where vLLM
    would find too little memory."""
    rows = _read_rows(options) if device.type == "cuda" else []
    if not rows:
        return 0
    speculative = vllm_config.speculative_config
    draft = None if speculative is None else speculative.draft_model_config
    models = [vllm_config.model_config]
    models += [] if draft is None or draft is vllm_config.model_config else [draft]
    found = [
        (config, wanted)
        for config in models
        if (wanted := find_wanted(vllm_config, config, device, options, disk, Outcome()))
    ]
    maps = not options.copy and options.source is not Source.DISK
    mapped = [wanted.key for _, wanted in found if maps]
    total: int = sum(row["bytes"] for row in rows if row["key"] in mapped)
    cache = vllm_config.cache_config
    gpu_bytes = torch.cuda.mem_get_info(device)[1]
    share: int = math.ceil(gpu_bytes * cache.gpu_memory_utilization)
    publishes = options.publish and options.source is not Source.IPC_CACHE
    if publishes:
        keys = [(str(config.model), wanted.key) for config, wanted in found]
        _give_up(find_superseded(rows, keys), device, options)
        rows = _read_rows(options)
    held = [row["key"] for row in rows]
    if found and (publishes or all(wanted.key in held for _, wanted in found)):
        free_bytes, place = torch.cuda.mem_get_info(device)[0], found[0][1].memory.device
        drafts = [wanted.content.digest for config, wanted in found if config is draft]
        spare = find_spare(rows, mapped, drafts, place, free_bytes, share - total)
        _give_up(spare, device, options)
    return total if cache.kv_cache_memory_bytes is None else min(total, share - 1)


def _read_rows(options: Options) -> list[dict[str, Any]]:
    with (
        suppress(WcacheError, OSError),
        VaultClient(options.socket_path, options.connect_timeout_s) as client,
    ):
        return client.stat()
    return []


def _give_up(rows: Sequence[Mapping[str, Any]], device: torch.device, options: Options) -> None:
    """Drop rows of `stat`, and wait a moment until the GPU has their memory back."""
    wanted = torch.cuda.mem_get_info(device)[0]
    for row in rows:
        with (
            suppress(WcacheError, OSError),
            VaultClient(options.socket_path, options.connect_timeout_s) as client,
        ):
            client.drop(row["id"])
            logger.info("resident weights given up: %s", row["id"])
            wanted += row["bytes"]
    deadline = time.monotonic() + _BACK_S
    while torch.cuda.mem_get_info(device)[0] < wanted and time.monotonic() < deadline:
        time.sleep(_BACK_POLL_S)


def _find_folder(model_config: Any, disk: Any) -> Path:
    model = Path(model_config.model)
    if model.is_dir():
        return model
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    where = {"cache_dir": disk.load_config.download_dir, "revision": model_config.revision}
    with suppress(LocalEntryNotFoundError):
        folder = Path(snapshot_download(model_config.model, local_files_only=True, **where))
        if read_versions(folder):
            return folder
    disk.download_model(model_config)
    return Path(snapshot_download(model_config.model, local_files_only=True, **where))


def _log_progress() -> Callable[[int, int], None]:
    last = time.monotonic()

    def progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > _PROGRESS_EVERY_S:
            last = now
            logger.info("reading weight files done=%d total=%d", done_bytes, total_bytes)

    return progress
