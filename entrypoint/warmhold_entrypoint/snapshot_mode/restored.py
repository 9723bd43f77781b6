# SPDX-License-Identifier: Apache-2.0
"""An engine brought back from a snapshot: the act, in a thread of its own, and the process then.

The runner's loop goes on meanwhile; everything here is bounded by time limits of its own.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from warmhold_snapshot import pids
from warmhold_snapshot.artifact import Store
from warmhold_snapshot.errors import SnapshotError
from warmhold_snapshot.identity import is_on_gpu
from warmhold_snapshot.mark import clear_mark, write_mark
from warmhold_snapshot.restore import Limits, restore
from warmhold_snapshot.upstream import is_upstreams
from warmhold_wcache.control_client import ControlError

from ..container.conf import CONTROL_SOCKET, VAULT_SOCKET
from ..errors import Rejection
from ..gpus.gpu_memory import CODE, Need, wait_for_memory
from ..gpus.gpu_snapshots import find_plugins
from ..log import Log
from ..running import tree
from ..running.adopted import AdoptedChild
from ..running.engine_process import EngineProcess
from ..running.loop import Loop
from ..running.phases import Phases
from ..settings import Settings
from ..weight_cache.resident import COMING, Vault, read_vault
from ..weight_cache.room import make_room
from .flat_weights import publish_flat
from .snapshot_engine import ControlledEngine
from .snapshots import FOLDER, read_circumstances, split_generations

# What may be otherwise at the next start, and what a new artifact is no answer to.
CIRCUMSTANTIAL = (
    *("snapshot.weights-absent", "snapshot.pids-taken", "snapshot.port-taken"),
    *("snapshot.busy", "snapshot.stopped", "snapshot.disk", "snapshot.gpu-memory"),
)
# What a GPU without memory ends with: criu's plug-in, or the engine as it maps its KV cache.
_OF_MEMORY = ("snapshot.restore", "snapshot.resume")
# The artifact is sound, or gone: it gets no mark.
_UNMARKED = (*CIRCUMSTANTIAL, "snapshot.weights-damaged")
# A stop waits so long for a restore, which is then ended.
_STOP_S = 5.0
_AGAIN_S = 0.2
_NEAR = 200
_VAULT_S = 5.0
_VAULT_POLL_S = 0.05
_GPU_S = 120.0  # a driver that has no other user wakes the GPU up first

_NOTHING = Need({})

_log = Log("snapshot")


@dataclass(frozen=True)
class Wish:
    """What is to be restored: the artifact `name` in `folder`, whose engine has the `control`
    socket and whose weights the `vault` socket hands out, with `flat` out of flat files where it
    does not hold them; every byte is verified with `checksums`. `plugins` is the folder of criu's
    plug-ins. `memory` has to be free on GPUs where nothing is resident, and is waited for
    `memory_s` seconds."""

    folder: Path
    name: str
    control: Path
    vault: Path
    checksums: bool
    flat: bool
    plugins: Path | None = None
    memory: Need = _NOTHING
    memory_s: float = 0.0


def build_wish(settings: Settings, name: str, memory: Need = _NOTHING) -> Wish:
    """Given settings, an artifact's name and what its engine needs on GPUs, return what is to be
    restored."""
    env = settings.env
    return Wish(
        folder=env.state_dir / FOLDER,
        name=name,
        control=env.run_dir / CONTROL_SOCKET,
        vault=env.run_dir / VAULT_SOCKET,
        checksums=env.snapshot_verify == "always",
        flat=env.snapshot_weights == "flat",
        plugins=find_plugins(settings),
        memory=memory,
        memory_s=env.gpu_wait_s,
    )


class Restoration:
    """One restore. Owns a thread, the pipe of the engine's log, and until `process` is taken the
    tree. `wake` is called at its end."""

    def __init__(self, wish: Wish, wake: Callable[[], None]) -> None:
        self.reader, self._writer = os.pipe()
        self.done = False
        self.error: SnapshotError | None = None
        self.process: AdoptedChild | None = None
        self.current = "vault"
        self.weights: dict[str, object] | None = None  # none of the vault's are mapped
        self._wish = wish
        self._wake = wake
        self._stop = threading.Event()
        self._waits: list[threading.Event] = []  # a stop ends these too
        self._shortage = ""
        self._generations: set[str] = set()  # what the artifact's engine maps
        self._published: list[str] = []
        self._began = self._last = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="restore", daemon=True)
        self._thread.start()

    def wait(self, loop: Loop) -> EngineProcess | None:
        """Wait for its end; return the engine, also one that failed later, with its log. Once a
        stop is asked for no more bytes are read, and the wait is bounded."""
        give_up_at: float | None = None
        while not self.done:
            if loop.stop_asked:
                for event in (self._stop, *self._waits):
                    event.set()
                give_up_at = give_up_at or time.monotonic() + _STOP_S
                if time.monotonic() > give_up_at:
                    tree.kill_below(os.getpid(), _STOP_S)  # criu, and what it has made
                    give_up_at = time.monotonic() + _AGAIN_S
            loop.wait(give_up_at)
        if self.process is None:
            os.close(self.reader)
            return None
        return EngineProcess(self.process, self.reader, self.see_line, loop)

    def see_line(self, line: bytes) -> None:
        """A restored engine's lines end no phase."""

    def see_listening(self) -> None:
        """It listens from the first moment."""

    def finish(self) -> Phases:
        """The first token has come: close the last phase and return all."""
        self._close("first_token", "")
        return Phases(dict(self._seconds), self._last - self._began)

    def _run(self) -> None:
        try:
            self._restore()
        except SnapshotError as error:
            self.error = error
        except ControlError as error:
            code = "snapshot.canary"
            if self.current == "weights":
                of_vault = error.code.startswith("wcache.")
                code = "snapshot.weights-absent" if of_vault else "snapshot.resume"
            self.error = SnapshotError(code, str(error), error.remedy)
        except Exception as error:  # a bug here must not cost the engine's next rung
            self.error = SnapshotError("snapshot.restore", repr(error), "please report it")
        finally:
            if self.error and self._shortage:
                self.error = _explain(self.error, self._shortage)
            os.close(self._writer)
            self.done = True
            self._wake()

    def _restore(self) -> None:
        wish = self._wish
        store = Store(wish.folder)
        self._generations = split_generations(store.read(wish.name))
        absent = _find_absent(self._generations, wish)
        self._close("vault", "flat" if absent else "image")
        if absent:
            self._wait_for_memory(self._stop)
            for generation_id in absent:
                count = publish_flat(store, generation_id, wish.vault, self._go_on)
                self._published.append(generation_id)
                _log.info("weights read from a flat file", id=generation_id, bytes=count)
            self._close("flat", "image")
        manifest = store.read(wish.name)
        on_gpu = is_on_gpu(manifest.identity)
        pass_by(manifest.ids())
        restored = restore(
            store,
            wish.name,
            self._writer,
            checksums=wish.checksums,
            plugins=wish.plugins if on_gpu else None,
            limits=Limits(criu_s=_GPU_S + wish.memory_s) if on_gpu else Limits(),
            progress=self._go_on,
            ready=self._wait_for_memory if on_gpu and not absent else None,
        )
        self.process = AdoptedChild(restored.pid, restored.pidfd)
        self._close("image", "weights")
        self._split_image(restored.phases)
        _log.debug("restored", **{f"{name}_s": value for name, value in restored.phases.items()})
        engine = ControlledEngine(wish.control)
        engine.map_weights()
        self._close("weights", "canary")
        engine.require_canary(restored.manifest.canary)
        self._tell_weights(engine.generations())
        # Clients have waited: nobody is answered by an engine that is not proved, and an engine
        # that is busy with their requests is not asked anything any more.
        engine.resume()
        clear_mark(store.path(wish.name))
        self._close("canary", "first_token")

    def _wait_for_memory(self, over: threading.Event) -> None:
        wish = self._wish
        if not wish.memory.by_uuid:
            return
        self._waits.append(over)
        need = make_room(wish.vault.parent, wish.memory, self._generations)
        shortage = wait_for_memory(need, wish.memory_s, over)
        if shortage and not over.is_set():  # what ends a wait is not that
            self._shortage = shortage
            _log.warning("too little GPU memory is free", code=CODE, detail=shortage)

    def _tell_weights(self, found: Mapping[str, int]) -> None:
        if not found:
            return
        self.weights = {
            "mode": "flat" if self._published else "ipc_cache",
            "bytes": sum(found.values()),
            "seconds": self._seconds.get("flat", 0.0) + self._seconds["weights"],
            "loads": len(found),
            "code": "",
            "reason": "",
            "fields": [],
            "published": self._published,
            "not_published": "",
        }

    def _go_on(self, done_bytes: int, total_bytes: int) -> None:
        if self._stop.is_set():
            raise SnapshotError("snapshot.stopped", "it was interrupted by a stop", "none")

    def _split_image(self, phases: Mapping[str, float]) -> None:
        """The checksums are a phase of their own."""
        verify_s = phases.get("verify", 0.0)
        image_s = self._seconds.pop("image")
        self._seconds["verify"] = verify_s
        self._seconds["image"] = image_s - verify_s

    def _close(self, name: str, following: str) -> None:
        now = time.monotonic()
        self._seconds[name] = now - self._last
        self._last, self.current = now, following


def _explain(error: SnapshotError, shortage: str) -> SnapshotError:
    """Given why a restore failed that had to do without some GPU memory, return it with that, and
    as no fault of the artifact where that can be the reason."""
    detail = f"{error.detail} ({CODE}: {shortage})"
    if error.code in _OF_MEMORY:
        remedy = "free the GPU, or raise WARMHOLD_GPU_WAIT_S"
        return SnapshotError("snapshot.gpu-memory", detail, remedy, error.lines)
    return SnapshotError(error.code, detail, error.remedy, error.lines)


def reject(wish: Wish, error: SnapshotError) -> Rejection:
    """Given what was to be restored and why it could not be, say so, keep it beside the artifact
    with the circumstances where it may be at fault, and return it as a reason."""
    rejection = Rejection("snapshot", error.code, error.detail, error.remedy)
    for line in error.lines:
        _log.warning("criu", line=line)
    _log.warning("restore failed", code=error.code, detail=error.detail)
    if error.code in _UNMARKED or is_upstreams(wish.name):
        return rejection
    with suppress(OSError, SnapshotError):
        path = Store(wish.folder).path(wish.name)
        write_mark(path, error, read_circumstances(read_vault(wish.vault)))
    return rejection


def pass_by(ids: set[int]) -> None:
    """Given process ids, see to it that nothing that is started now gets one of them."""
    if min(ids) - _NEAR < pids.read_cursor() < max(ids):
        with suppress(SnapshotError, RuntimeError):
            pids.raise_cursor(max(ids))


def _find_absent(wanted: set[str], wish: Wish) -> list[str]:
    """Return the generations that have to come out of flat files. A vault that is just starting is
    waited for. Raise SnapshotError `snapshot.weights-absent` where there can be no flat file."""
    deadline = time.monotonic() + _VAULT_S
    while True:
        vault = read_vault(wish.vault, _VAULT_S) if wanted else Vault()
        absent = sorted(wanted - {row["id"] for row in vault.rows})
        if not absent or (wish.flat and not vault.code):
            return absent
        if vault.code not in COMING or time.monotonic() > deadline:
            detail = vault.detail or f"the vault does not hold {', '.join(absent)}"
            remedy = "none: another mode loads them"
            raise SnapshotError("snapshot.weights-absent", detail, remedy)
        time.sleep(_VAULT_POLL_S)
