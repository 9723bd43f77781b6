# SPDX-License-Identifier: Apache-2.0
"""From an environment and a command to a plan, for every command that needs one.

Also owns the command's copy in the run directory, from which the runner learns it.
"""

import dataclasses
import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from msgspec import structs
from warmhold_snapshot.artifact import Store
from warmhold_snapshot.errors import SnapshotError

from .command import build_engine_argv, build_engine_environment
from .container.conf import ENGINE_FOLDER, check_paths
from .errors import EntrypointError, Fault
from .facts import Facts, read_facts
from .files import read_json, write_atomically
from .log import Log
from .plan import Plan, build_key, decide
from .settings import Settings, read_settings
from .snapshot_mode.snapshots import FOLDER, Candidate, Snapshots, read_snapshots
from .weight_cache import weights

PLAN_FILE = "plan.json"
COMMAND_FILE = "command.json"

_log = Log("plan")


def make_plan(
    command: Sequence[str], tolerated: Collection[str] = (), snapshot: str = "", mode: str = ""
) -> tuple[Settings, Plan, list[Fault], list[str]]:
    """Given the container's command, return settings, plan, all faults together, and the notes.

    What is found with a code among `tolerated` is no fault. With the name of a `snapshot` no other
    one is restored; a `mode` takes the place of WARMHOLD_MODE.
    """
    settings, faults, notes = read_settings(os.environ, command)
    if mode:
        settings = dataclasses.replace(settings, env=structs.replace(settings.env, mode=mode))
    facts = read_facts(settings)
    kept = tuple(fault for fault in facts.faults if fault.code not in tolerated)
    facts = dataclasses.replace(facts, faults=kept)
    plan = decide(settings, dataclasses.replace(facts, snapshots=_look(settings, facts, snapshot)))
    return settings, plan, [*faults, *check_paths(settings), *plan.faults], notes


def _look(settings: Settings, facts: Facts, wanted: str) -> Snapshots:
    """What snapshots there are of the engine that would be started."""
    nodes = facts.numa_nodes
    candidate = Candidate(
        argv=build_engine_argv(settings, facts, None),
        environment={**settings.environ, **build_engine_environment(settings, facts)},
        versions={
            **facts.versions,
            # What the sizes of pools of threads and of the KV cache come from.
            "cpus": f"{facts.cpus} of {facts.cpu_affinity} in {nodes} NUMA node(s)",
            "memory": str(facts.memory_limit_bytes),
            "kv_cache_gib": str(settings.env.kv_cache_gib),
            "uid": str(settings.env.engine_uid),
        },
        packages=facts.packages,
        key=build_key(settings, facts),
        model_directory=facts.model.directory,
        gpus=facts.gpus,
    )
    return read_snapshots(settings, candidate, facts.vault, wanted)


def make_sound_plan(
    command: Sequence[str], tolerated: Collection[str] = (), snapshot: str = "", mode: str = ""
) -> tuple[Settings, Plan]:
    """Given the same, return settings and plan; raise EntrypointError for any fault."""
    settings, plan, faults, notes = make_plan(command, tolerated, snapshot, mode)
    for note in notes:
        _log.warning("unknown setting", detail=note)
    if faults:
        raise EntrypointError(faults)
    return settings, plan


def prepare_folders(settings: Settings, plan: Plan) -> None:
    """Make the folders that the engine writes into, its own, and the run directory.

    Raise EntrypointError with the path where that fails.
    """
    uid = os.getuid() if plan.uid is None else plan.uid
    cache = Path(plan.cache_dir)
    of_engine = [cache, cache / "home", settings.env.run_dir / ENGINE_FOLDER]
    of_engine.append(weights.digests_folder(settings))
    if plan.model_directory is None:
        of_engine.append(settings.env.models_dir / "hub")  # the download runs without rights too
    for folder in [settings.env.run_dir, settings.env.state_dir, cache.parent, *of_engine]:
        try:
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            if folder in of_engine and folder.stat().st_uid != uid:
                # What lies in a folder of the engine's may be a link that the engine has put there.
                os.chown(folder, uid, uid, follow_symlinks=folder.parent not in of_engine)
        except OSError as error:
            raise EntrypointError(
                [
                    Fault(
                        "rights.not-writable",
                        f"{folder} cannot be made by uid {os.getuid()}: {error.strerror}",
                        "mount a volume there that this user may write to",
                    )
                ]
            ) from error


def prepare_snapshots(settings: Settings) -> None:
    """Make the folder of snapshots and the key that seals them, where they are wanted."""
    if settings.env.snapshot != "off":
        try:
            Store(settings.env.state_dir / FOLDER)
        except SnapshotError as error:
            _log.warning("no snapshots", code=error.code, detail=error.detail)


def write_loader(settings: Settings, plan: Plan) -> None:
    """Write what the weight loader in the engine is told, and forget what an earlier one said."""
    weights.forget_reports(settings.env.run_dir)
    if plan.loader:
        path = settings.env.run_dir / weights.LOADER_FILE
        write_atomically(path, json.dumps(plan.loader), mode=0o644)


def write_command(run_dir: Path, command: Sequence[str]) -> None:
    """Given the run directory, keep the container's command for the runner (it may hold a key)."""
    write_atomically(run_dir / COMMAND_FILE, json.dumps({"command": list(command)}))


def read_command(run_dir: Path) -> tuple[str, ...]:
    """Given the run directory, return the command of the running container; empty outside one."""
    value = read_json(run_dir / COMMAND_FILE)
    return tuple(value["command"]) if value else ()


def log_plan(plan: Plan) -> None:
    """Say what will be tried and why the other modes are not."""
    for rejection in plan.rejections:
        _log.info(
            "mode rejected", mode=rejection.mode, code=rejection.code, detail=rejection.detail
        )
    modes = ",".join(attempt.mode for attempt in plan.attempts)
    _log.info("plan made", attempts=modes, model=plan.model, directory=plan.model_directory)
