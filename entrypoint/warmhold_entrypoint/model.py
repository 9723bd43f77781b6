# SPDX-License-Identifier: Apache-2.0
"""Where the model is: one directory, found once, or the list of places where it is not.

Reads file names, sizes and the safetensors index only; downloads nothing.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from .errors import Fault

DEMO = "demo"
DEMO_DIR = Path("/opt/warmhold/demo")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


@dataclass(frozen=True)
class Model:
    """A model that was looked for.

    `directory` is where it lies, or None where it must be downloaded first (a Hugging Face id that
    is in no cache, online); `weight_bytes` is the size of its weight files, 0 where unknown.
    """

    name: str
    directory: str | None
    weight_bytes: int
    looked_at: tuple[str, ...] = ()


def find_model(
    name: str, revision: str | None, models_dir: Path, offline: bool, demo_dir: Path = DEMO_DIR
) -> tuple[Model, list[Fault]]:
    """Given a name, return the model and the faults: a path that is none, or incomplete weights.

    A path is taken as it is. A Hugging Face id is looked for below `models_dir` as `hub/models--*`,
    as `models--*` and as a plain folder; a snapshot counts only when all its weights are there.
    """
    if name == DEMO:
        candidates = [demo_dir]
    elif _is_path(name):
        candidates = [Path(name)]
    else:
        candidates = _hub_candidates(name, revision, models_dir)
    looked_at: list[str] = []
    for candidate in candidates:
        problem = _problem(candidate)
        if problem is None:
            return Model(name, str(candidate), _weight_bytes(candidate), tuple(looked_at)), []
        looked_at.append(f"{candidate} ({problem})")
    model = Model(name, None, 0, tuple(looked_at))
    if name != DEMO and not _is_path(name) and _HUB_ID.fullmatch(name) and not offline:
        return model, []
    return model, [_missing(model, offline, models_dir)]


def find_folder(name: str, models_dir: Path) -> Path | None:
    """Given what an option names (a path or a Hugging Face id), return the folder that vLLM would
    read, or None. A word without a slash is no folder: most of them mean something else."""
    if "/" not in name and not _is_path(name):
        return None
    candidates = [Path(name)]
    if _HUB_ID.fullmatch(name):
        candidates += _hub_candidates(name, None, models_dir)
    return next((path for path in candidates if path.is_dir()), None)


def _is_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~"))


def _missing(model: Model, offline: bool, models_dir: Path) -> Fault:
    looked = ", ".join(model.looked_at) or f"nothing below {models_dir}"
    if _is_path(model.name) or model.name == DEMO:
        remedy = (
            "mount the folder into the container; WARMHOLD_MODELS=/host/folder makes it /models"
        )
    elif offline:
        remedy = f"put it below {models_dir}, or unset HF_HUB_OFFLINE so that it can be fetched"
    else:
        remedy = "give a Hugging Face id (owner/name), an absolute path, or demo"
    return Fault("model.missing", f"{model.name!r} is not there; looked at: {looked}", remedy)


def _hub_candidates(name: str, revision: str | None, models_dir: Path) -> list[Path]:
    folder = "models--" + name.replace("/", "--")
    candidates: list[Path] = []
    for root in (models_dir / "hub", models_dir):
        cached = root / folder
        reference = cached / "refs" / (revision or "main")
        commit = _read_line(reference) or revision
        if commit:
            candidates.append(cached / "snapshots" / commit)
        elif cached.is_dir():
            candidates.extend(sorted((cached / "snapshots").glob("*")))
        else:
            candidates.append(cached)
    if revision is None:
        candidates.extend([models_dir / name, models_dir / name.rpartition("/")[2]])
    return candidates


def _problem(directory: Path) -> str | None:
    """Tell what keeps a directory from being a complete model, or None."""
    try:
        if not directory.is_dir():
            return "no such folder"
        if not (directory / "config.json").exists() and not any(directory.glob("*.gguf")):
            return "no config.json"
        index = directory / "model.safetensors.index.json"
        if index.exists():
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            missing = sorted(shard for shard in shards if not (directory / shard).exists())
            return (
                f"{len(missing)} of {len(shards)} shards missing: {missing[0]}" if missing else None
            )
        if not weight_files(directory):
            return "no weight files"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"unreadable: {error}"
    return None


def weight_files(directory: Path) -> list[Path]:
    """Given a model's folder, return its weight files, of the first kind present: it may hold the
    same weights twice."""
    for pattern in _WEIGHTS:
        files = sorted(path for path in directory.glob(pattern) if path.exists())
        if files:
            return files
    return []


def _weight_bytes(directory: Path) -> int:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return sum((directory / name).stat().st_size for name in names)
    return sum(path.stat().st_size for path in weight_files(directory))


def _read_line(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None
