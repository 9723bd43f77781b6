# SPDX-License-Identifier: Apache-2.0
"""The process that makes a snapshot for the runner: a request on stdin, lines of JSON on stdout.

A process of its own, so that the runner's loop waits for nothing, and so that the runner learns by
its end that a maker was killed: the engine is then resumed by another one, with `resume` alone.
Lines: `{"event": "resumed"}` when the engine serves again, and at last the result.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from warmhold_snapshot.artifact import Store
from warmhold_snapshot.create import Report, create
from warmhold_snapshot.errors import SnapshotError
from warmhold_wcache.control_client import ControlError

from ..log import Log, configure_logging
from .flat_weights import open_weights, write_flat
from .snapshot_engine import ControlledEngine
from .snapshots import GENERATIONS

_SEE_WEIGHTS = (
    "see `weights` in `warmhold status --json` for why; `warmhold restart` may share them"
)
_log = Log("snapshot")


def make(request: dict[str, Any], engine: ControlledEngine) -> dict[str, Any]:
    """Given a request and the engine, make the artifact; return what it is. Raise SnapshotError."""
    store = Store(Path(request["folder"]))
    for left in store.sweep():
        _log.warning("removed what a killed maker left", folder=left)
    store.sweep_weights()
    try:
        generations = sorted(engine.generations())
    except ControlError as error:
        remedy = "the engine goes on as before; see its log"
        raise SnapshotError("snapshot.engine", error.detail, remedy) from error
    plugins = Path(request["plugins"]) if request["plugins"] else None
    if plugins and not generations:
        # They would leave the GPU and be written while every request waits, seconds a gigabyte.
        detail, remedy = "the weights are on the GPU alone, and in no vault", _SEE_WEIGHTS
        raise SnapshotError("snapshot.detached", detail, remedy)
    vault, kept = Path(request["vault"]), generations if request["weights"] == "flat" else []
    with open_weights(vault, kept) as weights:
        report = create(
            request["pid"],
            engine,
            store,
            request["name"],
            request["identity"],
            notes={GENERATIONS: " ".join(generations)},
            weights=weights,
            write=partial(write_flat, vault),
            other_uid=request["other_uid"],
            plugins=plugins,
            compress=request["compress"],
        )
    for note in report.notes:
        _log.warning("of the snapshot", note=note)
    if request["prune"]:
        try:
            for name in store.prune(keep=1, prefix=request["prune"]):
                _log.info("removed an older snapshot", name=name)
        except (OSError, SnapshotError) as error:
            _log.warning("older snapshots stay", detail=str(error))
    return describe(report)


def describe(report: Report) -> dict[str, Any]:
    """Given a report, return it as plain values."""
    return {
        "ok": True,
        "name": report.path.name,
        "pause_s": report.pause_s,
        "frozen_s": report.frozen_s,
        "image_bytes": report.image_bytes,
        "weights_bytes": report.weights_bytes,
        "bytes_by_kind": dict(report.bytes_by_kind),
        "bytes_by_process": {str(pid): size for pid, size in report.bytes_by_process.items()},
        "seconds": dict(report.timings),
        "notes": list(report.notes),
    }


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Given a request, do what it asks; return the result, also of what failed."""
    engine = ControlledEngine(
        Path(request["control"]), request["drain_s"], lambda: _say({"event": "resumed"})
    )
    try:
        if request["act"] == "resume":
            engine.resume()
            return {"ok": True}
        return make(request, engine)
    except SnapshotError as error:
        for line in error.lines:
            _log.warning("criu", line=line)
        return {"ok": False, **error.to_json()}
    except ControlError as error:
        return {
            "ok": False,
            "code": "snapshot.resume",
            "detail": f"the engine does not serve again: {error}",
            "remedy": error.remedy,
        }
    except Exception as error:  # a bug here costs no more than the snapshot
        _log.error("bug", exc_info=True, detail=repr(error))
        remedy = "please report it, with the container's log"
        return {"ok": False, "code": "snapshot.failed", "detail": repr(error), "remedy": remedy}
    except KeyboardInterrupt:
        detail, remedy = "it was interrupted by a stop", "try again when the engine serves"
        return {"ok": False, "code": "snapshot.stopped", "detail": detail, "remedy": remedy}


def main() -> NoReturn:
    """Do what the request on stdin asks."""
    configure_logging(os.environ)
    result = answer(json.loads(sys.stdin.read()))
    _say(result)
    sys.exit(0 if result["ok"] else 1)


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
