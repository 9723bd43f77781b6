# SPDX-License-Identifier: Apache-2.0
"""What runs between the dump and the engine's going on, started by criu while the tree is frozen.

It looks at the tree once more (a connection may have come after the scan before the dump), saves
/dev/shm, and leaves its findings in a file beside the images. It ends with 1 where the dump is not
to be kept; criu then lets the tree go on all the same. A process of its own, so that the engine
goes on even when whoever asked for the snapshot was killed meanwhile. Stdlib only, for its start.
"""

import dataclasses
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import shm
from .errors import SnapshotError
from .pids import read_tree
from .scan import scan
from .script import program

FINDINGS, PACK = "post-dump.json", "shm.img"
_ACTION = "post-dump"


@contextmanager
def script(
    draft: Path,
    root_pid: int,
    ghost_limit_bytes: int,
    on_gpu: bool = False,
    shm_folder: Path = shm.FOLDER,
) -> Iterator[Path]:
    """Given the artifact's folder, the tree's root and whether criu takes CUDA along, make the
    script that criu calls, for as long as it is needed; raise SnapshotError as `program` does."""
    package = str(Path(__file__).parents[1])
    code = (
        f"import sys; sys.path.insert(0, {package!r}); "
        f"from {__package__}.hook import main; main(*sys.argv[1:])"
    )
    words = [sys.executable, "-I", "-S", "-c", code, str(draft), str(root_pid)]
    words += [str(ghost_limit_bytes), str(int(on_gpu)), str(shm_folder)]
    with program(draft, _ACTION, f"exec {shlex.join(words)}") as path:
        yield path


def main(folder: str, root_pid: str, ghost_limit_bytes: str, on_gpu: str, shm_folder: str) -> None:
    """Scan, save, leave the findings; end with 1 where the dump is not to be kept."""
    findings: dict[str, object] = {}
    try:
        found = scan(int(root_pid), int(ghost_limit_bytes), on_gpu == "1")
        found.require_clean("of the frozen engine")
        files = shm.save(found.shm_inodes, Path(folder, PACK), Path(shm_folder))
        findings["shm"] = [dataclasses.asdict(file) for file in files]
        tree = read_tree(int(root_pid))
        findings["processes"] = [dataclasses.asdict(process) for process in tree]
        findings["files"] = [dataclasses.asdict(file) for file in found.files]
    except SnapshotError as error:
        findings["error"] = error.to_json()
    except OSError as error:
        detail = f"what lies in {shm_folder} cannot be saved: {error}"
        remedy = "see `snapshot check` for the free space"
        findings["error"] = SnapshotError("snapshot.disk", detail, remedy).to_json()
    Path(folder, FINDINGS).write_text(json.dumps(findings))
    sys.exit(1 if "error" in findings else 0)
