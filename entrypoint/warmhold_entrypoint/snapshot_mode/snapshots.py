# SPDX-License-Identifier: Apache-2.0
"""Snapshots as facts: which artifact fits what would be started now, and what is against others.

Reads only, within milliseconds: manifests are read and compared, image files are not touched, and
no program but `criu --version` is run. Nothing here decides: `plan.decide` does.
"""

import dataclasses
import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import warmhold_snapshot
import warmhold_wcache
from warmhold_snapshot import check, criu, identity
from warmhold_snapshot.artifact import Store
from warmhold_snapshot.errors import SnapshotError
from warmhold_snapshot.identity import Difference, summarise
from warmhold_snapshot.manifest import Manifest
from warmhold_snapshot.mark import read_mark
from warmhold_wcache.key import compare as compare_keys

from ..arguments import EngineArguments
from ..gpus.gpu import Gpus
from ..gpus.gpu_snapshots import find_gpu_obstacle, find_plugins, identify
from ..log import redact_argv
from ..settings import HUB_TOKENS, Settings, is_offline
from ..weight_cache import weights
from ..weight_cache.backend import choose_backend
from ..weight_cache.resident import COMING, Vault
from .inputs import read_inputs
from .revoked import collect_secrets, collect_served, find_revoked, find_unsealed

FOLDER = "snapshots"
AUTO_PREFIX = "auto-"  # of the names of snapshots that nobody asked for
GENERATIONS = "generations"  # among a manifest's notes: the weights that its engine had mapped
# What differs between two containers of one configuration, or names the user of a shell.
_VOLATILE = re.compile(
    r"HOSTNAME|PWD|OLDPWD|SHLVL|TERM|_|HF_TOKEN|HUGGING_FACE_HUB_TOKEN|SUPERVISOR_\w+"
    r"|KUBERNETES_\w+|\w+_SERVICE_(HOST|PORT)\w*|\w+_PORT_\d+_(TCP|UDP)\w*"
)
_CREATE = "run `snapshot create` in the container while the engine serves"


@dataclass(frozen=True)
class Snapshots:
    """What there is: `name` is the newest artifact that can be restored, or `code` says why none
    can. `identity` is that of what would be started now (empty where there can be no artifact),
    `revoked` the names of artifacts to be removed, whatever the code."""

    code: str = "snapshot.absent"
    detail: str = "there is none yet"
    remedy: str = _CREATE
    name: str = ""
    identity: Mapping[str, str] = field(default_factory=dict)
    revoked: tuple[str, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """The engine that would be started: argv, environment, version ids, distributions, the launch
    key of its weights, where its model lies (None: to be downloaded first), and its GPUs."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    versions: Mapping[str, str]
    packages: Sequence[str]
    key: Mapping[str, str]
    model_directory: str | None
    gpus: Gpus = field(default_factory=Gpus)


def read_snapshots(
    settings: Settings, candidate: Candidate, vault: Vault, wanted: str = ""
) -> Snapshots:
    """Given settings, the engine that would be started and what the vault holds, return what there
    is. With a `wanted` name no other artifact counts, and that one does although a restore of it
    failed before."""
    folder = settings.env.state_dir / FOLDER
    found, gpus = find_obstacle(settings, candidate), candidate.gpus
    if not folder.is_dir():
        return found or Snapshots()
    secrets, served = collect_secrets(settings), collect_served(settings)
    files = read_inputs(settings, candidate.model_directory)
    try:
        store = Store(folder)
    except SnapshotError as error:
        found = found or Snapshots(error.code, error.detail, error.remedy)
        return dataclasses.replace(found, revoked=find_unsealed(folder, error, secrets))
    if found is None:
        try:
            now = identity.collect_identity(
                key=store.key,
                criu_version=criu.read_version(),
                versions={
                    **candidate.versions,
                    "python": platform.python_version(),
                    "code": digest_code(),
                },
                argv=redact_argv(candidate.argv),
                environment={
                    name: identity.digest(store.key, text)
                    for name, text in candidate.environment.items()
                    if not _VOLATILE.fullmatch(name)
                },
                files=files,
                packages=candidate.packages,
                secrets=secrets,
                served=served,
                weights=json.dumps(dict(candidate.key)),
                gpu=identify(gpus, find_plugins(settings)) if gpus.all else {},
            )
            flat = settings.env.snapshot_weights == "flat"
            return judge(store, now, read_circumstances(vault), vault, wanted, flat)
        except SnapshotError as error:
            found = Snapshots(error.code, error.detail, error.remedy or _CREATE)
    revoking = identity.collect_revoking(store.key, secrets, files, served)
    revoked = find_revoked(folder, _read_manifests(store, wanted), revoking)
    return dataclasses.replace(found, revoked=revoked)


def find_obstacle(settings: Settings, candidate: Candidate) -> Snapshots | None:
    """Given settings and the engine that would be started, return why there can be no snapshot of
    it here, whatever artifacts there are; None where there can."""
    env, arguments = settings.env, settings.arguments
    if env.snapshot == "off":
        return Snapshots("snapshot.off", "WARMHOLD_SNAPSHOT=off", "set WARMHOLD_SNAPSHOT=manual")
    if choose_backend(settings, bool(candidate.gpus.all)) == "vllm":
        detail = "weights that `vllm preload` shares by CUDA IPC cannot be checkpointed"
        remedy = "none: ipc_cache starts it; on one GPU WARMHOLD_WCACHE=vault has snapshots"
        return Snapshots("snapshot.backend", detail, remedy)
    if not weights.uses_loader(settings):
        detail = f"--load-format {weights.load_format(settings)}: vLLM's own loader maps nothing"
        return _unsupported(detail, "use a format that reads safetensors or .bin files")
    if (servers := arguments.api_server_count) > 1:
        return _unsupported(f"{servers} API servers share the engine", "set --api-server-count 1")
    if elsewhere := arguments.elsewhere:
        detail = f"{elsewhere}: a part of the engine runs elsewhere"
        return _unsupported(detail, "run all of the engine in one container, without Ray")
    if candidate.model_directory is not None and (holder := _find_hub_token(settings, candidate)):
        detail = f"{holder}: a snapshot would hold a token of the Hugging Face hub"
        remedy = "unset HF_HUB_OFFLINE, so that the engine is offline, and leave it out of --config"
        return _unsupported(detail, remedy)
    if candidate.gpus.all and (
        reason := find_gpu_obstacle(
            settings,
            candidate.gpus,
            candidate.argv,
            candidate.environment,
            candidate.model_directory,
        )
    ):
        return Snapshots(*reason)
    if missing := check.find_missing_rights(bool(env.engine_uid)):
        detail = ", ".join(point.name for point in missing)
        remedy = "; ".join(point.remedy for point in missing)
        return Snapshots("snapshot.rights", detail, remedy)
    return None


def judge(
    store: Store,
    now: Mapping[str, str],
    circumstances: Mapping[str, str],
    vault: Vault,
    wanted: str = "",
    flat: bool = False,
) -> Snapshots:
    """Given the store, the identity and circumstances now, the vault, and whether flat files stand
    in for it, return the newest artifact that fits, or what is against the newest."""
    against: list[tuple[str, str, str]] = []
    fits = ""
    manifests = _read_manifests(store, wanted)
    revoked = find_revoked(store.folder, manifests, now)
    for name, manifest in manifests:
        if isinstance(manifest, SnapshotError):
            against.append((manifest.code, f"{name}: {manifest.detail}", manifest.remedy))
            continue
        differences = find_differences(manifest.identity, now)
        if not fits:
            reason = _reason_against(store, manifest, differences, circumstances, wanted)
            reason = reason or _find_missing_weights(store, manifest, vault, flat)
            if reason is None:
                fits = name
            else:
                against.append(reason)
    if fits:
        code, detail, remedy = "", f"{fits} fits", ""
    elif against:
        code, detail, remedy = against[0]
    else:
        code, detail, remedy = "snapshot.absent", "there is none yet", _CREATE
        if wanted:
            detail, remedy = f"no snapshot {wanted}", "see `snapshot list`"
    return Snapshots(code, detail, remedy, fits, now, revoked)


def find_differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[Difference]:
    """Given two identities, return the fields that differ. Launch keys of the same weights may
    differ as texts: what the digest of a checkpoint is becomes known in its first load."""
    if "weights" in then and not compare_keys(
        json.loads(then["weights"]), json.loads(now["weights"])
    ):
        now = {**now, "weights": then["weights"]}
    return identity.compare(then, now)


def read_circumstances(vault: Vault) -> dict[str, str]:
    """Return what a restore may fail for that is no part of an engine's identity: this container,
    its /dev/shm, and what the vault holds."""
    started = Path("/proc/1/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    shm = os.statvfs("/dev/shm")
    return {
        "container": f"{boot} {platform.node()} {started}",
        "shm_bytes": str(shm.f_blocks * shm.f_frsize),
        "weights": " ".join(sorted(row["id"] for row in vault.rows)),
    }


def digest_code() -> str:
    """Return a digest of warmhold's code: the engine's part lives on in a snapshot, and the others
    have to understand it.

    Of the bytes, which takes 3 ms: builds that can be repeated give every file one mtime, and other
    builds of the same code give it another.
    """
    found = hashlib.sha256()
    for package in (
        Path(__file__).parent,
        Path(warmhold_snapshot.__file__),
        Path(warmhold_wcache.__file__),
    ):
        folder = package.parent
        for path in sorted(folder.rglob("*.py")):
            found.update(f"{path.relative_to(folder.parent)} ".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def split_generations(manifest: Manifest) -> set[str]:
    """Given a manifest, return the ids of the generations that its engine maps."""
    return set(manifest.notes.get(GENERATIONS, "").split())


def _unsupported(detail: str, remedy: str) -> Snapshots:
    return Snapshots("snapshot.unsupported", detail, remedy)


def _find_hub_token(settings: Settings, candidate: Candidate) -> str:
    """What gives the engine a token for downloads, or "": what downloads nothing is not given any,
    but reads its --config itself."""
    if not is_offline(candidate.environment):
        for name in HUB_TOKENS:
            if candidate.environment.get(name):
                return name
    arguments = EngineArguments(tuple(candidate.argv), settings.arguments.config)
    return "--hf-token" if arguments.has("--hf-token") else ""


def _read_manifests(store: Store, wanted: str) -> list[tuple[str, Manifest | SnapshotError]]:
    """Every artifact with its manifest, the newest first, and then those that cannot be read."""
    found: list[tuple[str, Manifest | SnapshotError]] = []
    for name in store.names():
        if wanted in ("", name):
            try:
                found.append((name, store.read(name)))
            except SnapshotError as error:
                found.append((name, error))
    return sorted(
        found,
        key=lambda item: item[1].created if isinstance(item[1], Manifest) else "",
        reverse=True,
    )


def _reason_against(
    store: Store,
    manifest: Manifest,
    differences: Sequence[Difference],
    circumstances: Mapping[str, str],
    wanted: str,
) -> tuple[str, str, str] | None:
    """Code, detail and remedy where an artifact cannot be restored now."""
    name = manifest.name
    if differences:
        detail = f"{name}: {summarise(differences)}"
        return "snapshot.identity-mismatch", detail, _CREATE
    mark = read_mark(store.path(name))
    if mark is not None and not wanted and mark.circumstances == circumstances:
        detail = f"{name}: {mark.code}: {mark.detail}"
        remedy = f"`snapshot restore {name}` tries it again; or create a new one"
        return "snapshot.marked-failed", detail, remedy
    try:
        store.verify(manifest, checksums=False)  # what can be seen without reading
    except SnapshotError as error:
        return error.code, error.detail, error.remedy
    return None


def _find_missing_weights(
    store: Store, manifest: Manifest, vault: Vault, flat: bool
) -> tuple[str, str, str] | None:
    """Code, detail and remedy where the vault does not hold the weights and cannot get them."""
    absent = sorted(split_generations(manifest) - {row["id"] for row in vault.rows})
    if not absent or vault.code == "loading":
        return None
    code, why = "snapshot.weights-absent", vault.detail or "WARMHOLD_SNAPSHOT_WEIGHTS=none"
    if flat and vault.code in ("", *COMING):
        try:
            for generation_id in absent:
                store.flat.verify(generation_id)
            return None
        except SnapshotError as error:
            code, why = error.code, error.detail
    detail = f"{manifest.name}: the vault does not hold {', '.join(absent)}; {why}"
    return code, detail, "none: another mode loads them; a new container's vault is empty"
