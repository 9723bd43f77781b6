# SPDX-License-Identifier: Apache-2.0
"""The files that an engine reads at its start, as versions: they live on in a snapshot of it.

A small file's version is a digest of its bytes, a large one's its size and mtime. Neither ctime
nor inode: they change where an image is pulled again or a volume copied, and the file does not.
Weight files of the model are left out, the weights' key has them. Nothing here decides what a
change means.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from warmhold_wcache.content import find_weight_files

from ..model import find_folder
from ..settings import Settings

Versions = dict[str, str]  # path -> version

MODEL = "model"
LORA_OPTIONS = ("lora-modules", "default-mm-loras")
_SMALL_BYTES = 4 << 20
_ALL_BYTES = 16 << 20  # of one option's files: 10 ms
_MAX_PATH = 4096
# What a folder of a model, an adapter or a tokenizer has, and how deep such folders are.
_MARKS = (
    *("config.json", "adapter_config.json", "generation_config.json", "params.json"),
    *("tokenizer.json", "tokenizer_config.json", "tekken.json"),
)
_MAX_DEPTH = 2
# The engine writes there, or lets clients read it; or it is no path, or compared elsewhere.
_NOT_READ = frozenset(
    """
    allowed-local-media-path api-key compilation-config disable-access-log-for-endpoints
    download-dir ec-transfer-config hf-token kv-events-config kv-transfer-config
    mm-encoder-fp8-scale-save-path model profiler-config revision root-path served-model-name
    ssl-ca-certs ssl-certfile ssl-keyfile uds
    """.split()  # noqa: SIM905
)


def read_inputs(settings: Settings, model_directory: str | None) -> dict[str, Versions]:
    """Given settings and where the model lies, return the files by what names them: `model`, an
    option, a variable of vLLM's. What names no file or folder that exists has no entry."""
    found: dict[str, dict[str, Path]] = {}
    if model_directory is not None:
        folder = Path(model_directory)
        weight_files = set(find_weight_files(folder))
        files = {name: path for name, path in _walk(folder) if path not in weight_files}
        found[MODEL] = files
    for option, values in settings.arguments.options():
        name = option.lstrip("-")
        if name.partition(".")[0] not in _NOT_READ:
            for value in values:
                for text in _find_texts(value):
                    found.setdefault(name, {}).update(_find_files(text, settings.env.models_dir))
    for name, value in settings.environ.items():
        if name.startswith("VLLM_") and value.startswith("/"):
            found[f"environment.{name}"] = _find_files(value, None)
    return {name: read_versions(files) for name, files in found.items() if files}


def read_versions(files: Mapping[str, Path]) -> Versions:
    """Given files by name, return the version of each."""
    left_bytes = _ALL_BYTES
    versions = {}
    for name, path in sorted(files.items()):
        try:
            status = path.stat()
            if status.st_size <= min(_SMALL_BYTES, left_bytes):
                content = path.read_bytes()
                left_bytes -= len(content)
                versions[name] = f"sha256 {hashlib.sha256(content).hexdigest()}"
            else:
                versions[name] = f"stat {status.st_size} {status.st_mtime_ns}"
        except OSError as error:
            versions[name] = f"unreadable: {error.strerror}"
    return versions


def _find_texts(value: str) -> Iterator[str]:
    """Yield what may be a path in an option's value: all of it, what NAME= precedes, and every text
    in JSON."""
    yield value
    if value[:1] in ("{", "["):
        try:
            yield from _walk_json(json.loads(value))
        except ValueError:
            return
    elif "=" in value:
        yield value.partition("=")[2]


def _walk_json(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _walk_json(item)


def _find_files(text: str, models_dir: Path | None) -> dict[str, Path]:
    """The file that a text names, or those in the folder that it names, which may lie in the
    Hugging Face cache; by path. A folder that is none of a model, an adapter or a tokenizer is not
    walked through: it may be any, even the root."""
    if not text or len(text) > _MAX_PATH or "\n" in text or "\0" in text:
        return {}  # a template, or other prose
    try:
        if Path(text).is_file():
            return {text: Path(text)}
        folder = None if models_dir is None else find_folder(text, models_dir)
        if folder is None or not any((folder / name).exists() for name in _MARKS):
            return {}
    except OSError:  # a part of it is longer than a name can be, or may not be looked into
        return {}
    return {str(path): path for _, path in _walk(folder)}


def _walk(folder: Path) -> Iterator[tuple[str, Path]]:
    """Every regular file below a folder with its relative name; links to files count as files, what
    is hidden (.git, .cache) and what Python compiled as nothing."""
    for root, folders, names in os.walk(folder):
        depth = len(Path(root).relative_to(folder).parts)
        shown = [name for name in folders if name[:1] != "." and name != "__pycache__"]
        folders[:] = shown if depth < _MAX_DEPTH else []
        for name in names:
            path = Path(root, name)
            if name[:1] != "." and _is_regular(path):
                yield str(path.relative_to(folder)), path


def _is_regular(path: Path) -> bool:
    """Not a pipe, which would be waited for; nor a link to nowhere."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False
