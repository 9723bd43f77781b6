# SPDX-License-Identifier: Apache-2.0
"""Whether a checkpoint on disk still is what a generation was published from: every byte is read.

Kept digests are not asked, because what they say rests on file times. The weight files are compared
alone: what a changed configuration would do is known only to the engine that reads it.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from .content import ContentError, Progress, compute_content, find_weight_files
from .errors import WcacheError


class State(StrEnum):
    """What can be found. Only `changed` and `unreadable` are failures."""

    SAME = "same"
    CHANGED = "changed"
    NOT_FOUND = "not-found"
    UNREADABLE = "unreadable"
    UNKNOWN = "unknown"  # the generation does not say what it was published from


@dataclass(frozen=True)
class Finding:
    """What was found of one generation's checkpoint; `folder` is where it was looked for."""

    state: State
    folder: str
    detail: str = ""

    @property
    def failed(self) -> bool:
        """Whether a checkpoint is there that could not be confirmed."""
        return self.state in (State.CHANGED, State.UNREADABLE)

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON values."""
        return asdict(self)

    def line(self) -> str:
        """Return the finding as part of a line."""
        shown = {
            State.CHANGED: "CHANGED (content)",
            State.NOT_FOUND: f"not found ({self.folder})",
            State.UNREADABLE: f"UNREADABLE ({self.detail})",
            State.UNKNOWN: "unknown (its key has no content)",
        }
        return f"checkpoint: {shown.get(self.state, self.state)}"


def make_reader(progress: Progress | None) -> Callable[[Path], str]:
    """Given who is told of the progress, return what reads a folder's content digest: all of its
    weight files, several at once, and no folder twice (ranks share one)."""
    return cache(lambda folder: compute_content(folder, None, progress).digest)


def check_checkpoint(row: Mapping[str, Any], read_digest: Callable[[Path], str]) -> Finding:
    """Given a row of `stat` and what reads a folder's digest, compare it with the published one.

    Raise WcacheError (wcache.unsupported) where digests cannot be computed here.
    """
    published = row["key"].get("content")
    folders = list(_candidates(row))
    expected = str(folders[0]) if folders else str(row["model"])
    if not published:
        return Finding(State.UNKNOWN, expected)
    folder = next((folder for folder in folders if find_weight_files(folder)), None)
    if folder is None:
        return Finding(State.NOT_FOUND, expected)
    try:
        digest = read_digest(folder)
    except ModuleNotFoundError as error:
        raise WcacheError(
            "wcache.unsupported",
            f"the checkpoint cannot be read: the package {error.name} is not installed",
            "run it in the image, or with --resident-only",
        ) from error
    except (ContentError, OSError) as error:
        return Finding(State.UNREADABLE, str(folder), str(error))
    return Finding(State.SAME if digest == published else State.CHANGED, str(folder))


def _candidates(row: Mapping[str, Any]) -> Iterator[Path]:
    """Where the checkpoint may lie: the model where it is a path, and the files that the engine was
    started with. Those are not a draft model's; and a relative path was relative to the engine."""
    model = Path(row["model"])
    if model.is_absolute():
        yield model
    if row["key"].get("is_draft") != "true":
        with suppress(ValueError, TypeError, LookupError):
            files = json.loads(row["launch_key"]["files"])
            # Some models have weights in folders below as well.
            yield min((Path(path).parent for path, *_ in files), key=lambda path: len(path.parts))
