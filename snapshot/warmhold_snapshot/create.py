# SPDX-License-Identifier: Apache-2.0
"""Makes a snapshot of a running engine, which goes on serving, whatever happens here.

In this order: rights, scan, hold, canary, quiesce, scan, dump, resume; then, with the engine
serving again, flat weights, checksums, manifest, rename. The engine is the
caller's: this module only says when it is to do what.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from . import awake, check, compression, criu, cuda, frozen, images
from .artifact import IMAGES, Draft, Store, describe_files
from .checksum import Progress
from .clock import Clock
from .errors import SnapshotError
from .flat import Weights
from .manifest import FORMAT, ImageFile, Manifest
from .mark import utc_now
from .pids import read_tree
from .rules import GHOST_LIMIT_BYTES
from .scan import Scan, scan
from .verdict import Verdict, judging

_T = TypeVar("_T")
# Given the store and weights, brings them into their flat file. Raises SnapshotError; where the
# code is `snapshot.weights-absent` or `snapshot.disk` the artifact is made without them.
Write = Callable[[Store, Weights], None]
_POLL_S = 0.02
# Until the engine is held and quiesced these are what they should be.
_GIVEN_BACK = frozenset({"tcp-peer", "unix-peer", "unix-pending", "memfd"})
_LOST = "stop the engine and start it anew"


class Engine(Protocol):
    """A running engine, as its owner can speak to it. Any exception ends the snapshot."""

    def hold(self) -> None:
        """Answer 503 to what comes, end what is under way within a bound, close idle connections.
        Raise where a request outlasts the bound: none is cut."""

    def canary(self) -> Any:
        """Answer known prompts while held; return the answers as plain JSON values."""

    def quiesce(self) -> None:
        """Give weights and caches back, close every connection to outside the tree, and accept none
        until `resume`: what comes meanwhile waits in the listener's queue."""

    def resume(self) -> None:
        """Undo `quiesce` and `hold`, or what was done of them; harmless where nothing was. Return
        once the engine serves; raise where it cannot."""


@dataclass(frozen=True)
class Limits:
    """Times in seconds, sizes in bytes. `settle_s`: how long closed connections may take to go."""

    dump_s: float = 180.0
    settle_s: float = 5.0
    ghost_bytes: int = GHOST_LIMIT_BYTES


@dataclass(frozen=True)
class Report:
    """What was made. `pause_s` is from the call of hold to the end of resume, `frozen_s` the part
    in which no process ran; `timings` has each step. Bytes are of image files, `weights_bytes` of
    the flat files."""

    path: Path
    pause_s: float
    frozen_s: float
    image_bytes: int
    weights_bytes: int
    bytes_by_kind: Mapping[str, int]
    bytes_by_process: Mapping[int, int]
    timings: Mapping[str, float]
    notes: tuple[str, ...] = ()


def create(
    root_pid: int,
    engine: Engine,
    store: Store,
    name: str,
    identity: Mapping[str, str],
    *,
    notes: Mapping[str, str] | None = None,
    weights: Sequence[Weights] = (),
    write: Write = lambda store, item: store.flat.write(item),
    other_uid: bool = False,
    plugins: Path | None = None,
    compress: bool = False,
    limits: Limits = Limits(),
    progress: Progress | None = None,
) -> Report:
    """Given the engine's first process, the engine, a store, a name, and the identity that a
    restore has to find again, make an artifact and return what it is.

    Raise SnapshotError; the engine then runs and was resumed, and there is no artifact. The one
    exception is the code `snapshot.resume`: the engine could not be resumed and has to be started
    anew. `notes` are kept in the manifest, `weights` in flat files, by `write`; what cannot be read
    or finds no room is left out, and the report says so. `plugins` is the folder of criu's plug-ins
    where the engine is on a GPU, None where it is on the CPU. With `compress` its memory is kept in
    LZ4. `progress` follows the checksums.
    """
    clock = Clock()
    with clock.step("check"):
        points = check.read_found(store.folder)
        needed = check.estimate_bytes(root_pid)
        needed += 0 if plugins is None else cuda.STATE_BYTES
        check.require(check.conclude(points, needed, other_uid, plugins=plugins))
        before = scan(root_pid, limits.ghost_bytes, plugins is not None)
        before_quiesce = [item for item in before.offenders if item.kind not in _GIVEN_BACK]
        Scan(tuple(before_quiesce)).require_clean("at all")
    with store.draft(name) as draft:
        began = time.monotonic()
        with awake.awake(plugins) as holder, _paused(engine, clock):
            with clock.step("hold"):
                _ask(engine.hold)
            with clock.step("canary"):
                canary = _ask(engine.canary)
            with clock.step("quiesce"):
                _ask(engine.quiesce)
            with clock.step("scan"):
                found = _scan_until_clean(root_pid, limits, plugins is not None)
            with clock.step("dump"):
                findings, outcome, users = _dump(root_pid, draft, limits, plugins, holder)
        pause_s = time.monotonic() - began
        by_process = images.measure_by_process(draft.folder / IMAGES)
        if compress:
            with clock.step("compress"):
                compression.compress(draft.folder / IMAGES)
        with clock.step("checksums"):
            files = describe_files(draft.folder, progress)
        # The last, since these are many bytes: where they find no room, the rest has had it.
        with clock.step("weights"):
            kept, left_out = _write_weights(store, weights, write)
        statistics = criu.parse_statistics(outcome.output)
        manifest = Manifest(
            format=FORMAT,
            name=name,
            created=utc_now(),
            identity=dict(identity),
            processes=findings.processes,
            stdio=found.stdio,
            listeners=found.listeners,
            open_files=findings.files,
            counts=dict(found.counts),
            shm=findings.shm,
            files=files,
            bytes_by_kind=_by_kind(files),
            bytes_by_process=by_process,
            timings={**clock.timings, "pause": pause_s},
            canary=canary,
            notes=dict(notes or {}),
            weights={item.id: item.size_bytes for item in kept},
            cuda=users,
        )
        with clock.step("publish"):
            path = store.publish(draft, manifest)
    return Report(
        path=path,
        pause_s=pause_s,
        frozen_s=statistics.get("Frozen time", 0) / 1e6,
        image_bytes=manifest.image_bytes,
        weights_bytes=sum(manifest.weights.values()),
        bytes_by_kind=manifest.bytes_by_kind,
        bytes_by_process=manifest.bytes_by_process,
        timings=clock.timings,
        notes=(*found.notes, *left_out),
    )


@contextmanager
def _paused(engine: Engine, clock: Clock) -> Iterator[None]:
    """Whatever happens within, resume the engine afterwards; a failure of that outranks others."""
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        with clock.step("resume"):
            try:
                engine.resume()
            except Exception as error:
                detail = f"the engine does not serve again: {error}"
                if failure is not None:
                    detail += f" (after: {failure})"
                raise SnapshotError("snapshot.resume", detail, _LOST) from (failure or error)


def _ask(question: Callable[[], _T]) -> _T:
    """Ask the engine; what it raises becomes a SnapshotError."""
    try:
        return question()
    except SnapshotError:
        raise
    except Exception as error:
        remedy = "the engine goes on as before; see its log"
        raise SnapshotError("snapshot.engine", str(error) or repr(error), remedy) from error


def _scan_until_clean(root_pid: int, limits: Limits, on_gpu: bool) -> Scan:
    """A closed connection is gone only once both ends have seen it: look until then."""
    deadline = time.monotonic() + limits.settle_s
    while (found := scan(root_pid, limits.ghost_bytes, on_gpu)).offenders:
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    found.require_clean(f"{limits.settle_s:g} s after the engine was quiesced")
    return found


def _dump(
    root_pid: int, draft: Draft, limits: Limits, plugins: Path | None, holder: Mapping[str, str]
) -> tuple[frozen.Findings, criu.Outcome, tuple[int, ...] | None]:
    before, folder = read_tree(root_pid), draft.folder
    users = None if plugins is None else cuda.find_users([process.pid for process in before])
    verdict: Verdict[frozen.Findings] | None = None

    def look(_: object) -> frozen.Findings:
        on_gpu = plugins is not None
        return frozen.look(root_pid, folder / frozen.PACK, limits.ghost_bytes, on_gpu)

    try:
        with judging(folder, frozen.ACTION, look, when_asked=True) as verdict:
            argv = criu.build_dump_argv(
                root_pid, folder / IMAGES, folder, verdict.script, limits.ghost_bytes, plugins
            )
            named = {**holder, **cuda.name_users(users)}
            log = folder / criu.DUMP_LOG
            outcome = criu.run(argv, limits.dump_s, log, [draft.lock_fd, *verdict.fds], named)
            findings = verdict.require()
    except SnapshotError as error:
        cuda.bring_back(users or (), holder)
        if verdict is not None and verdict.error is not None:
            raise verdict.error from error
        remedy = "the engine goes on as before; see the lines above"
        code = error.code if error.code == "snapshot.timeout" else "snapshot.dump"
        why = "" if plugins is None else cuda.explain(error.lines)
        detail = f"{error.detail} ({why})" if why else error.detail
        raise SnapshotError(code, detail, remedy, error.lines) from error
    after = {(process.pid, process.start_ticks) for process in findings.processes}
    if after != {(process.pid, process.start_ticks) for process in before}:
        detail = "processes of the engine came or went during the dump"
        raise SnapshotError("snapshot.dump", detail, "try again")
    return findings, outcome, users


def _write_weights(
    store: Store, weights: Sequence[Weights], write: Write
) -> tuple[list[Weights], list[str]]:
    """The weights that are in flat files now, and of each other one why it is not: an artifact
    without them serves as long as the vault has them."""
    kept, left_out = [], []
    for item in weights:
        try:
            if not store.flat.holds(item):
                check.require_room(store.folder, item.size_bytes)
            write(store, item)
            kept.append(item)
        except SnapshotError as error:
            if error.code not in {"snapshot.weights-absent", "snapshot.disk"}:
                raise
            left_out.append(f"no flat weights: {error.detail}")
    return kept, left_out


def _by_kind(files: tuple[ImageFile, ...]) -> dict[str, int]:
    return images.measure_by_kind({file.name: file.size_bytes for file in files})
