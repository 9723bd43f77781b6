# SPDX-License-Identifier: Apache-2.0
"""What upstream's `vllm snapshot` can do here: its scope, its commands, which artifact is meant.

Looks only, so that an order which cannot be met costs the running engine nothing; the commands are
run by `upstream_command`. Source: vLLM 0.33's entrypoints/cli/snapshot.py, validate_create_args,
and snapshot/{runtime,controller,manifest}.py.
"""

import dataclasses
import os
import platform
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from warmhold_snapshot import check, cuda
from warmhold_snapshot.errors import SnapshotError
from warmhold_snapshot.upstream import (
    LABEL,
    find_artifact,
    find_folder,
    is_upstreams,
    list_upstream,
    read_manifest,
)

from ..command import inherit_environment
from ..errors import Rejection
from ..gpus.gpu_snapshots import PLUGIN_DIR, find_plugins
from ..model import DEMO
from ..plan import Attempt, Plan
from ..running.orders import CREATE, Order
from ..settings import HUB_TOKENS, Settings
from ..weight_cache.weights import PLUGIN
from .snapshots import AUTO_PREFIX, FOLDER, Snapshots

SCOPE = "snapshot.upstream-scope"
_COMMIT = re.compile(r"[0-9a-fA-F]{40}")
_COMMAND = Path("vllm/entrypoints/cli/snapshot.py")
_PROGRAMS = ("vllm", "criu", "nvidia-smi", "ps")
_MACHINE_ID = Path("/etc/machine-id")
_SIZES = (
    *("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"),
    *("--prefill-context-parallel-size", "--api-server-count"),
)
_FRONTEND = (
    *("--grpc", "--headless", "--uds", "--middleware", "--ssl-keyfile", "--ssl-certfile"),
    *("--ssl-ca-certs", "--enable-ssl-refresh", "--ssl-ciphers"),
)
_DRAFTING = ("--speculative-config", "--spec-method", "--spec-model", "--spec-tokens")
_NO_LOGPROBS = ("raw_logits", "processed_logits")
_SLEEP = "--enable-sleep-mode"
# Said in another place: by position, expanded, by the environment, and at each restore.
_DROPPED = ("--model", "--config", "--hf-token", "--host", "--port")
_LEAVE_OUT = "leave that out, or make a snapshot without --backend vllm"

Offender = tuple[str, str]  # what is outside the scope, and what to do about it


def find_offenders(settings: Settings, plan: Plan) -> list[Offender]:
    """Given settings and plan of the engine, return all that is outside upstream's scope."""
    return [*_about_arguments(settings), *_about_product(settings, plan), *_about_machine(settings)]


def _about_arguments(settings: Settings) -> Iterator[Offender]:
    arguments, model = settings.arguments, settings.model
    if model == DEMO or Path(model).exists():
        yield f"model {model} is a local one", "name a model of the Hugging Face hub"
    revision = arguments.value("--revision") or ""
    if not _COMMIT.fullmatch(revision):
        yield "no --revision of 40 hexadecimal digits", "give the commit as --revision"
    for option in _SIZES:
        if arguments.count(option) > 1:
            yield f"{option} {arguments.count(option)}", _LEAVE_OUT
    for option in _FRONTEND:
        if arguments.has(option):
            yield option, _LEAVE_OUT
    if settings.api_keys:
        yield "an API key", _LEAVE_OUT
    named = {name.partition(".")[0] for name, _ in arguments.options()}
    for option in _DRAFTING:
        if option in named:
            yield option, _LEAVE_OUT
    if arguments.value("--logprobs-mode") in _NO_LOGPROBS:
        yield f"--logprobs-mode {arguments.value('--logprobs-mode')}", _LEAVE_OUT


def _about_product(settings: Settings, plan: Plan) -> Iterator[Offender]:
    """What would break a promise of warmhold's: upstream's engine keeps the container's rights."""
    env = settings.env
    if env.snapshot == "off":
        yield "WARMHOLD_SNAPSHOT=off", "set WARMHOLD_SNAPSHOT=manual"
    if env.mode not in ("auto", "snapshot"):
        yield f"WARMHOLD_MODE={env.mode}", "set WARMHOLD_MODE=auto"
    if env.engine_uid:
        yield f"WARMHOLD_ENGINE_UID={env.engine_uid}: upstream's runs as root", "unset it"
    if not plan.memory.by_uuid:
        yield "no whole NVIDIA GPU", "start it with compose.gpu.yaml"
    if plan.backend == "vllm":
        yield "WARMHOLD_WCACHE=vllm: its processes hold the GPU", "set WARMHOLD_WCACHE=vault"
    environment = inherit_environment(settings, plan.environment)
    if any(environment.get(name) for name in HUB_TOKENS):
        yield "the engine has a token of the Hugging Face hub", "unset HF_HUB_OFFLINE"


def _about_machine(settings: Settings) -> Iterator[Offender]:
    image, plugins = "use the image warmhold:cuda", find_plugins(settings)
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        yield f"{platform.system()} {platform.machine()}", "use Linux on x86_64"
    if not any((Path(folder) / _COMMAND).is_file() for folder in sys.path):
        yield "this vLLM has no `vllm snapshot` (0.33 has)", image
    for name in _PROGRAMS:
        if not shutil.which(name):
            yield f"no {name} on PATH", image
    if missing := cuda.find_missing(plugins):
        yield f"no {missing}", f"{image}, or set {PLUGIN_DIR}"
    if not _MACHINE_ID.is_file():
        yield f"no {_MACHINE_ID}", f"mount the host's {_MACHINE_ID}"
    for point in check.find_missing_rights():
        yield point.name, point.remedy
    for folder in find_folder(settings.env.state_dir / FOLDER).parents:
        if folder.is_symlink() or (folder.exists() and not _is_trusted(folder.stat())):
            yield f"{folder}: others may change it", "mount a volume that is root's alone"


def _is_trusted(found: os.stat_result) -> bool:
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    sticky = found.st_uid == 0 and found.st_mode & stat.S_ISVTX
    return found.st_uid in (0, os.geteuid()) and bool(sticky or not others_write)


def build_engine_words(settings: Settings) -> tuple[str, ...]:
    """Given settings, return the words of `vllm serve` for upstream's engine: the user's own, with
    the model by its name, and how it drains."""
    arguments = settings.arguments
    words = (settings.model, *arguments.words(_DROPPED))
    added = {
        "--shutdown-timeout": str(settings.env.drain_s),
        "--disable-access-log-for-endpoints": "/health,/metrics",
    }
    for option, value in added.items():
        if not arguments.has(option):
            words += (option, value)
    return words if _SLEEP in words else (*words, _SLEEP)  # as upstream adds it


def build_create_argv(settings: Settings, artifact: Path) -> tuple[str, ...]:
    """Given settings and the artifact's folder, return upstream's command that makes it."""
    words = build_engine_words(settings)
    return ("vllm", "snapshot", "create", *words, "--snapshot-dir", str(artifact))


def build_restore_argv(settings: Settings, artifact: Path) -> tuple[str, ...]:
    """Given settings and the artifact's folder, return upstream's command that restores it."""
    host = settings.arguments.value("--host")
    address = (*(("--host", host) if host else ()), "--port", str(settings.arguments.port))
    return ("vllm", "snapshot", "restore", str(artifact), *address)


def build_environment(settings: Settings, plan: Plan) -> dict[str, str]:
    """Given settings and plan of the engine, return the environment of upstream's commands: the
    engine's, without warmhold's part in it. Upstream compares much of it at a restore."""
    environment = inherit_environment(settings, plan.environment)
    del environment["WARMHOLD_CONTROL_SOCKET"]
    plugins = environment["VLLM_PLUGINS"].split(",")
    environment["VLLM_PLUGINS"] = ",".join(name for name in plugins if name != PLUGIN)
    environment[PLUGIN_DIR] = str(find_plugins(settings))
    if plan.model_directory:  # HUB/models--OWNER--NAME/snapshots/REVISION
        environment["HF_HUB_CACHE"] = str(Path(plan.model_directory).parents[2])
    # It has no filter in which io_uring answers ENOSYS; rings cannot be dumped. Source: libuv.
    environment["UV_USE_IO_URING"] = "0"
    return environment


def choose(settings: Settings, plan: Plan, order: Order) -> tuple[str, Rejection | None]:
    """Given settings and plan of the engine, and an order for upstream's commands, return the name
    of the artifact that is meant, with its label, and what is against the order."""
    if offenders := find_offenders(settings, plan):
        details, remedies = zip(*offenders, strict=True)
        detail = f"outside the scope of `vllm snapshot`: {'; '.join(details)}"
        return "", Rejection("snapshot", SCOPE, detail, "; ".join(dict.fromkeys(remedies)))
    try:
        pick = _pick_new if order.act == CREATE else _pick_old
        return pick(settings, order.name), None
    except SnapshotError as error:
        return "", Rejection("snapshot", error.code, error.detail, error.remedy)


def _pick_new(settings: Settings, name: str) -> str:
    if name == LABEL:
        name += f"snapshot-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    folder = find_folder(settings.env.state_dir / FOLDER)
    find_artifact(folder, name)
    if name in (row.name for row in list_upstream(folder)):  # what is half made will be removed
        remedy = "choose another name, or remove it with `snapshot prune`"
        raise SnapshotError(SCOPE, f"{name} is there already, and upstream replaces none", remedy)
    return name


def _pick_old(settings: Settings, name: str) -> str:
    folder = find_folder(settings.env.state_dir / FOLDER)
    if name == LABEL:
        usable = [row.name for row in list_upstream(folder) if row.state == "usable"]
        if not usable:
            remedy = "`snapshot create --backend vllm` makes one"
            raise SnapshotError("snapshot.absent", "there is none of upstream's yet", remedy)
        name = usable[0]
    then, now = read_manifest(folder, name).engine_argv, build_engine_words(settings)
    if then != now:  # upstream itself compares everything else
        words = sorted({*then} ^ {*now}) or ["their order"]
        detail = f"{name}: its engine was started with other arguments: {' '.join(words)}"
        raise SnapshotError("snapshot.identity-mismatch", detail, "create a new snapshot")
    return name


def put_first(settings: Settings, plan: Plan, name: str) -> Plan:
    """Given settings and the usual plan, return one that restores upstream's artifact first."""
    artifact = find_artifact(find_folder(settings.env.state_dir / FOLDER), name)
    attempt = Attempt("snapshot", build_restore_argv(settings, artifact), name)
    rejections = tuple(item for item in plan.rejections if item.mode != "snapshot")
    return dataclasses.replace(plan, attempts=(attempt, *plan.attempts), rejections=rejections)


def find_against_ours(
    found: Snapshots, restored: str, name: str = ""
) -> tuple[str, str, str] | None:
    """Given what snapshots of ours there are, what the running engine was restored from, and a
    name, return code, detail and remedy of why none of ours can be made of it; None where one can.
    """
    if name.startswith(AUTO_PREFIX):
        detail = f"{name}: such names are of those made by themselves, and so removed by themselves"
        return "snapshot.name", detail, "choose another name"
    if is_upstreams(restored):
        detail = f"{restored}: an engine that `vllm snapshot` restored cannot be held"
        return "snapshot.backend", detail, "`supervisorctl restart engine` starts one that can"
    return None if found.identity else (found.code, found.detail, found.remedy)
