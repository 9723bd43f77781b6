# SPDX-License-Identifier: Apache-2.0
"""The plan: which mode to try in which order, and for every other mode why not.

`decide` is pure: settings and facts in, plan out.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .budget import choose_kv_bytes, choose_threads, space_faults
from .command import build_engine_argv, build_engine_environment
from .errors import Fault, Rejection
from .facts import Facts
from .gpus.gpu_memory import Need, build_need
from .log import redact_argv
from .settings import MODES, Settings
from .snapshot_mode.snapshots import Snapshots
from .weight_cache import backend, weights
from .weight_cache.backend import Backend, choose_backend, count_local_ranks

# Reasons that are no fault where ipc_cache is demanded: the loader waits, and compares all fields.
_FORECASTS = ("ipc_cache.loading", "ipc_cache.hung", "ipc_cache.key-mismatch")


@dataclass(frozen=True)
class Attempt:
    """One rung of the ladder: a mode and the exact process that it starts."""

    mode: str
    argv: tuple[str, ...]
    snapshot: str = ""  # the artifact to restore; argv is then what it stands for


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
    # What the weight loader in the engine is told (a file); empty where upstream's is used.
    loader: Mapping[str, Any]
    snapshots: Snapshots
    # Who keeps the weights, and the key that they have to have.
    backend: Backend = "vault"
    launch_key: Mapping[str, str] = field(default_factory=dict)
    # What has to be free on GPUs where no weights are resident.
    memory: Need = field(default_factory=lambda: Need({}))

    def reject(self, rejection: Rejection) -> "Plan":
        """Given why a mode that was tried is not used, return the plan with it, ahead of others."""
        snapshots = self.snapshots
        if rejection.mode == "snapshot":
            snapshots = dataclasses.replace(snapshots, name="", code=rejection.code)
        rejections = (rejection, *self.rejections)
        return dataclasses.replace(self, rejections=rejections, snapshots=snapshots)

    def to_json(self) -> str:
        """Return the plan as JSON text, with secret arguments hidden."""
        shown = dataclasses.asdict(self)
        # An identity is a page of digests; the rejection says which field matters.
        shown["snapshots"] = {"name": self.snapshots.name, "revoked": self.snapshots.revoked}
        for attempt in shown["attempts"]:
            attempt["argv"] = redact_argv(attempt["argv"])
        return json.dumps(shown, indent=2)


def build_key(settings: Settings, facts: Facts) -> dict[str, str]:
    """Given settings and facts, return the launch key of the engine's weights."""
    # The loader's own options do not enter the key, nor does memory.
    return weights.build_key(
        settings,
        build_engine_argv(settings, facts, None),
        {**settings.environ, **build_engine_environment(settings, facts)},
        facts.content,
        facts.versions,
        facts.on_gpu,
    )


def decide(settings: Settings, facts: Facts) -> Plan:
    """Given settings and facts, return the plan.

    The plan has a rejection for every mode that is not attempted before `disk`, and a fault for all
    that makes a start pointless (it then has no attempts). So is the rejection of a named mode.
    """
    environment = build_engine_environment(settings, facts)
    key = build_key(settings, facts)
    # What is resident and not mapped takes memory besides; in mode disk that is all of it.
    from_disk = settings.env.mode == "disk"
    others = sum(
        row["bytes"] for row in facts.vault.rows if from_disk or not weights.is_resident(row, key)
    )
    packed = weights.linear_path(settings, facts.on_gpu) == "packed"
    copies = facts.model.weight_bytes if packed else 0
    keeper = choose_backend(settings, facts.on_gpu)
    publish = keeper == "vault"
    if keeper == "vllm":
        whole = {**settings.environ, **environment}
        miss = backend.find_obstacle(settings, whole, facts.on_gpu, facts.rocm, facts.vllm_version)
    else:
        miss = weights.find_miss(settings, facts.vault, key)
    kv_bytes, memory_fault = choose_kv_bytes(settings, facts, others + copies * publish)
    if memory_fault and copies and publish:
        miss = weights.no_room(memory_fault)
        publish = False
        kv_bytes, memory_fault = choose_kv_bytes(settings, facts, others)
    faults = [*facts.faults, *space_faults(settings, facts)]
    if memory_fault:
        faults.append(memory_fault)
    argv = build_engine_argv(settings, facts, kv_bytes)
    attempts, rejections = [], []
    for mode in MODES:
        reason = _reason_against(mode, settings, miss, facts.snapshots)
        if reason is None and mode == "snapshot":
            told = weights.add_loader(settings, argv, "auto")
            attempts.append(Attempt(mode, told, facts.snapshots.name))
        elif reason is None and keeper == "vllm":
            add = backend.add_ipc_loader if mode == "ipc_cache" else backend.add_disk_loader
            attempts.append(Attempt(mode, add(settings, argv)))
        elif reason is None:
            source = _choose_source(mode, settings, miss)
            attempts.append(Attempt(mode, weights.add_loader(settings, argv, source)))
        else:
            rejections.append(reason)
            if mode == settings.env.mode:
                faults.append(
                    Fault(
                        "mode.unavailable", f"{mode}: {reason.code}: {reason.detail}", reason.remedy
                    )
                )
    if weights.load_format(settings) in weights.OWN_FORMATS and keeper != "vllm":
        # The user's own choice is the same in every attempt that starts an engine.
        attempts = [item for item in attempts if item.snapshot] + [
            item for item in attempts if not item.snapshot
        ][:1]
    used = weights.uses_loader(settings) and keeper != "vllm"
    on_gpus = facts.gpus.all[: count_local_ranks(settings.arguments)]
    return Plan(
        attempts=() if faults else tuple(attempts),
        rejections=tuple(rejections),
        faults=tuple(faults),
        environment=environment,
        model=settings.model,
        model_directory=facts.model.directory,
        cache_dir=facts.cache_dir,
        uid=settings.env.engine_uid,
        threads=choose_threads(settings, facts),
        kv_cache_bytes=kv_bytes,
        loader=weights.build_loader_file(settings, key, publish) if used else {},
        snapshots=facts.snapshots,
        backend=keeper,
        launch_key=key,
        memory=build_need(settings.arguments, on_gpus),
    )


def _reason_against(
    mode: str, settings: Settings, miss: Rejection | None, snapshots: Snapshots
) -> Rejection | None:
    """Tell why a mode is not used, or None where it is."""
    wanted = settings.env.mode
    if wanted not in ("auto", mode):
        return Rejection(
            mode, f"{mode}.not-wanted", f"WARMHOLD_MODE={wanted}", "set WARMHOLD_MODE=auto"
        )
    if mode == "snapshot" and snapshots.code:
        return Rejection(mode, snapshots.code, snapshots.detail, snapshots.remedy)
    if mode == "ipc_cache" and miss and not (wanted == mode and miss.code in _FORECASTS):
        return miss
    return None


def _choose_source(mode: str, settings: Settings, miss: Rejection | None) -> str:
    """Where the loader of an attempt may take weights from: disk, ipc_cache or auto.

    The forecast is made within a moment and may be wrong, so in `auto` the loader looks for itself:
    a miss is a load from disk in the same process, never a second start. Disk alone follows an
    attempt that failed.
    """
    if settings.env.mode != "auto":
        return mode
    is_second_try = mode == "disk" and miss is None
    return "disk" if is_second_try or settings.env.wcache == "off" else "auto"
