# SPDX-License-Identifier: Apache-2.0
"""How the engine comes by its weights: what its loader is told, and what it says it did.

The loader is warmhold's in every mode, so that a model is computed on one CPU linear path whichever
way its weights came. It reads settings from a file, and writes a report for each model and rank.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from warmhold_wcache.content import Content
from warmhold_wcache.key import build_launch_key, compare
from warmhold_wcache.protocol import FdBag

from ..container.conf import ENGINE_FOLDER, VAULT_SOCKET
from ..errors import Fault, Rejection
from ..settings import Settings
from .resident import Vault

FAILED = "ipc_cache.failed"
PLUGIN = "warmhold"  # the name of our entry points in vLLM's groups
LOADER_FILE = "loader.json"
_MAX_REPORT_BYTES = 1 << 20
_FORMAT = "--load-format"
_EXTRA = "--model-loader-extra-config"
# What reads a checkpoint tensor by tensor into a model that exists. vLLM treats the other formats
# in places of their own, by name, so these must keep it.
_READERS = ("auto", "hf", "safetensors", "pt", "npcache", "mistral", "dummy")
_SOURCES = ("disk", "ipc_cache", "auto")
# The loader's own names: who gives one of them chooses for himself where weights come from.
OWN_FORMATS = ("warmhold", "ipc_cache")
_LOOK = "see the container's log"
_REMEDIES = {
    "off": "set WARMHOLD_WCACHE=vault",
    "loading": "none: the loader waits for it",
    "absent": "set WARMHOLD_MODE=auto, or preload: a new container's vault is empty",
    "other-uid": "run warmhold as the vault's user",
    "hung": "see `supervisorctl status wcache`, and restart it: no weights are lost by that",
    "dead-socket": "see `supervisorctl status wcache`",
    "key-mismatch": "none: the loader compares all of it",
}


def uses_loader(settings: Settings) -> bool:
    """Given settings, tell whether the engine loads through warmhold's loader."""
    dotted = any(name.startswith(_EXTRA + ".") for name, _ in settings.arguments.options())
    return not dotted and load_format(settings) in (*_READERS, *OWN_FORMATS)


def load_format(settings: Settings) -> str:
    """Given settings, return the load format that the user asked for."""
    return (settings.arguments.value(_FORMAT) or "auto").lower()


def linear_path(settings: Settings, on_gpu: bool = False) -> str:
    """Given settings, return the CPU linear path, `packed` where upstream's loader is used; ""
    where no CPU computes."""
    if on_gpu:
        return ""
    return settings.env.cpu_linear if uses_loader(settings) else "packed"


def add_loader(settings: Settings, argv: Sequence[str], source: str) -> tuple[str, ...]:
    """Given the engine's argv, return it with the loader and where its weights may come from.

    The user's own loader options stay; one who named this loader has the last word on the source.
    """
    if not uses_loader(settings):
        return tuple(argv)
    own = load_format(settings) in OWN_FORMATS
    text = settings.arguments.value(_EXTRA)
    try:
        given = dict(json.loads(text)) if text else {}
    except (ValueError, TypeError):
        return tuple(argv)  # told as a fault of its own, or by vLLM
    extra: dict[str, Any] = {"file": str(settings.env.run_dir / LOADER_FILE)}
    if not own and given.get("mode") not in _SOURCES:
        extra["source"] = source
    extra |= given
    name = load_format(settings) if own else "warmhold"
    return (*argv, _FORMAT, name, _EXTRA, json.dumps(extra))


def without_loader(settings: Settings) -> Settings:
    """Given settings, return them without the options that `add_loader` puts in anew."""
    if not uses_loader(settings):
        return settings
    arguments = settings.arguments.without(_FORMAT).without(_EXTRA)
    return replace(settings, arguments=arguments)


def build_loader_file(
    settings: Settings, launch_key: Mapping[str, str], publish: bool
) -> dict[str, Any]:
    """Given settings, the launch key and whether to publish, return the loader's settings."""
    env = settings.env
    reader = load_format(settings)
    return {
        "socket_path": str(env.run_dir / VAULT_SOCKET),
        "digests": str(digests_folder(settings)),
        "report": str(env.run_dir / ENGINE_FOLDER),
        "cpu_linear": env.cpu_linear,
        "disk_format": "auto" if reader in OWN_FORMATS else reader,
        "publish": publish,
        "launch_key": dict(launch_key),
    }


def digests_folder(settings: Settings) -> Path:
    """Given settings, return where digests of weight files are kept; the engine writes there."""
    return settings.env.state_dir / "digests"


def build_key(
    settings: Settings,
    argv: Sequence[str],
    environment: Mapping[str, str],
    content: Content,
    versions: Mapping[str, str],
    on_gpu: bool = False,
) -> dict[str, str]:
    """Given the engine's argv (`vllm serve MODEL ...`), its environment, the checkpoint's content,
    version ids and whether a GPU computes, return the launch key."""
    linear = linear_path(settings, on_gpu)
    return build_launch_key(argv[2:], environment, content, versions=versions, cpu_linear=linear)


def find_miss(settings: Settings, vault: Vault, wanted: Mapping[str, str]) -> Rejection | None:
    """Given what the vault holds and the wanted launch key, return why a miss is to be expected."""
    if not uses_loader(settings):
        detail = f"--load-format {load_format(settings)} goes its own way"
        return _miss("unsupported", detail, "use a format that reads safetensors or .bin files")
    if load_format(settings) == "dummy":
        return _miss("unsupported", "dummy weights have no content", "none: they are made anew")
    if vault.code:
        return _miss(vault.code, vault.detail, _REMEDIES.get(vault.code, _LOOK))
    if not vault.rows:
        return _miss("absent", "nothing is resident yet", _REMEDIES["absent"])
    nearest = min(
        (compare(row["launch_key"], wanted) for row in vault.rows if "launch_key" in row),
        key=len,
        default={"launch_key": (None, None)},
    )
    if not nearest:
        return None
    fields = [f"{name} ({_shorten(old)} → {_shorten(new)})" for name, (old, new) in nearest.items()]
    more = f" and {len(fields) - 4} more" if len(fields) > 4 else ""
    detail = f"resident weights differ in {', '.join(fields[:4])}{more}"
    return _miss("key-mismatch", detail, _REMEDIES["key-mismatch"])


def no_room(fault: Fault) -> Rejection:
    """Given why memory does not suffice with a resident copy, return it as a reason."""
    return _miss("memory", fault.detail, fault.remedy)


def did_not_serve(reason: str) -> Rejection:
    """Given why an engine in mode ipc_cache ended before it served, return it as a reason."""
    return Rejection("ipc_cache", FAILED, reason, "read its log above")


def _miss(code: str, detail: str, remedy: str) -> Rejection:
    return Rejection("ipc_cache", f"ipc_cache.{code}", detail, remedy)


def _shorten(value: str | None) -> str:
    return "none" if value is None else value if len(value) <= 24 else value[:21] + "..."


def is_resident(row: Mapping[str, Any], wanted: Mapping[str, str]) -> bool:
    """Given a row of `stat` and a launch key, tell whether they promise a hit."""
    return "launch_key" in row and not compare(row["launch_key"], wanted)


class Report(msgspec.Struct, frozen=True):
    """What one load did, as the loader writes it; the engine is not trusted with its form."""

    mode: Literal["disk", "ipc_cache"]
    bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
    seconds: dict[str, float]
    code: str
    reason: str
    fields: dict[str, Any]
    published: str
    not_published: str


def read_reports(run_dir: Path) -> list[Report]:
    """Given the run directory, return the reports since `forget_reports`; wrong ones are left."""
    reports = []
    for path in sorted((run_dir / ENGINE_FOLDER).glob("weights-*.json")):
        with suppress(OSError, msgspec.DecodeError, RecursionError):
            # Neither a link to follow nor a pipe to wait for: the folder is the engine's.
            with FdBag([os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)]) as bag:
                text = os.read(bag.fds[0], _MAX_REPORT_BYTES)
            reports.append(msgspec.json.decode(text, type=Report))
    return reports


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """Given the run directory, return what the reports since `forget_reports` say together."""
    return summarise(read_reports(run_dir))


def forget_reports(run_dir: Path) -> None:
    """Given the run directory, remove the reports of an earlier engine."""
    for path in (run_dir / ENGINE_FOLDER).glob("weights-*"):
        with suppress(OSError):
            path.unlink()


def summarise(reports: Sequence[Report]) -> dict[str, Any] | None:
    """Given an engine's reports, return one for all of its ranks and models; None without any.

    `mode` is ipc_cache where every one was a hit; `bytes` add up, `seconds` are the longest.
    """
    if not reports:
        return None
    worst = next((report for report in reports if report.mode != "ipc_cache"), reports[0])
    return {
        "mode": worst.mode,
        "bytes": sum(report.bytes for report in reports),
        "seconds": max(report.seconds.get("total", 0.0) for report in reports),
        "loads": len(reports),
        "code": worst.code,
        "reason": worst.reason,
        "fields": sorted(worst.fields),
        "published": [report.published for report in reports if report.published],
        "not_published": worst.not_published,
    }


def correct(rejections: Sequence[Rejection], found: Mapping[str, Any]) -> tuple[Rejection, ...]:
    """Given the plan's rejections and a summary, return them as it turned out."""
    others = [item for item in rejections if item.mode != "ipc_cache"]
    if found["mode"] == "ipc_cache":
        return tuple(others)
    if found["code"]:
        code = found["code"].removeprefix("wcache.")
        return (*others, _miss(code, found["reason"], _REMEDIES.get(code, _LOOK)))
    return tuple(rejections)
