#!/usr/bin/python3 -IS
# SPDX-License-Identifier: Apache-2.0
"""The program `cuda-checkpoint`: moves one process's CUDA state to the host, and back.

CRIU's cuda_plugin.so finds it on PATH and calls it several times for every process of a tree. So it
is one file without imports from its package, started without site packages: 15 ms a call, and no
compiler. It understands what the plug-in says to NVIDIA's program of that name, and answers as that
one does:

    cuda-checkpoint --help                        (the plug-in looks for --action in it)
    cuda-checkpoint --get-state --pid PID         prints running, locked, checkpointed or failed
    cuda-checkpoint --get-restore-tid --pid PID   prints the thread that works on a frozen process
    cuda-checkpoint --action lock|checkpoint|restore|unlock --pid PID [--timeout MS]

and, ours alone:

    cuda-checkpoint --hold                        keeps the driver awake until stdin ends

A driver that no process uses takes 0.3 s to wake up, in every call: also while an engine's own
processes are all checkpointed. One that is awake takes 0.03 s to get to know a process, on each
GPU. Whoever dumps or restores therefore holds it, and the holder does what the calls ask for: with
WARMHOLD_CUDA_SOCKET in its environment it listens there, and calls with that go to it. Without an
answer from there they do it themselves.

A process that has not mapped libcuda has no CUDA, and the driver is not asked for its thread. That
libcuda is mapped proves little, as torch does so on import: WARMHOLD_CUDA_PIDS, where it is set,
names the processes that use a GPU, and all others are left out of dump and restore. PID may be a
thread's. The plug-in reads both outputs into one buffer of 127 bytes, so that an error says the
essential first. Every call has a time limit; only a lock is undone by the driver when it is
reached. Ends with 0, 1 (the driver refused), 2 (usage, or no driver that can) or 124 (the time
limit).
Sources: plugins/cuda/cuda_plugin.c of CRIU 4.2.1, cuda.h of CUDA 12.8 and 13.0.
"""

import _socket
import _thread
import ctypes
import os
import sys
from collections.abc import Callable, Sequence

LIBRARY = "libcuda.so.1"
USERS = "WARMHOLD_CUDA_PIDS"  # separated by commas
SOCKET = "WARMHOLD_CUDA_SOCKET"
_STATES = ("running", "locked", "checkpointed", "failed")
_ACTIONS = {
    "lock": "cuCheckpointProcessLock",
    "checkpoint": "cuCheckpointProcessCheckpoint",
    "restore": "cuCheckpointProcessRestore",
    "unlock": "cuCheckpointProcessUnlock",
}
# Seconds. A checkpoint copies what is on the GPU at 10 GB/s or more: 140 GB fit.
_LIMITS_S = {"lock": 10.0, "checkpoint": 120.0, "restore": 120.0}
_LIMIT_S = 10.0
_GRACE_S = 5.0  # so that the driver's own limit of a lock comes first
_REFUSED, _UNABLE, _TIMED_OUT = 1, 2, 124
_MESSAGE_BYTES, _BACKLOG = 1 << 12, 16
USAGE = """usage: cuda-checkpoint --get-state --pid PID
       cuda-checkpoint --get-restore-tid --pid PID
       cuda-checkpoint --action lock|checkpoint|restore|unlock --pid PID [--timeout MS]
       cuda-checkpoint --hold
Needs the NVIDIA driver 570 or newer. -h, -p and -t are short for --help, --pid and --timeout.
"""


class CheckpointError(Exception):
    """An exit code and why."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class LockArgs(ctypes.Structure):
    """CUcheckpointLockArgs; the other calls' arguments are reserved bytes of the same size."""

    _fields_ = (("timeout_ms", ctypes.c_uint), ("reserved", ctypes.c_ubyte * 60))


def parse(argv: Sequence[str]) -> tuple[str, int, float]:
    """Given the arguments, return what to do (an action, "state" or "tid"), the PID and the limit
    in seconds; raise CheckpointError where they make no sense."""
    act, pid, limit_ms = "", 0, 0
    words = iter(argv)
    for word in words:
        if word in ("--get-state", "--get-restore-tid"):
            act = "state" if word == "--get-state" else "tid"
        elif word in ("--action", "--pid", "-p", "--timeout", "-t"):
            value = next(words, "")
            if word == "--action":
                act = value if value in _ACTIONS else ""
            elif not value.isdecimal():
                raise CheckpointError(_UNABLE, f"{word} needs a number, not {value!r}")
            elif word in ("--pid", "-p"):
                pid = int(value)
            else:
                limit_ms = int(value)
        else:
            raise CheckpointError(_UNABLE, f"unknown argument {word!r}")
    if not act or pid <= 0:
        raise CheckpointError(_UNABLE, "no action or PID; see cuda-checkpoint --help")
    return act, pid, limit_ms / 1000 or _LIMITS_S.get(act, _LIMIT_S)


class Driver:
    """libcuda's calls for checkpoints."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise CheckpointError(_UNABLE, f"no NVIDIA driver here: {error}") from None
        self._call("cuInit", 0)

    def state(self, pid: int) -> str:
        """Given a PID, return its state by name."""
        found = ctypes.c_int(-1)
        self._call("cuCheckpointProcessGetState", pid, ctypes.byref(found))
        return _STATES[found.value] if found.value in range(len(_STATES)) else "unknown"

    def restore_tid(self, pid: int) -> str:
        """Given a PID, return the thread that checkpoints and restores it."""
        found = ctypes.c_int(0)
        self._call("cuCheckpointProcessGetRestoreThreadId", pid, ctypes.byref(found))
        return str(found.value)

    def act(self, action: str, pid: int, limit_s: float) -> str:
        """Given an action, do it; there is nothing to say."""
        arguments = LockArgs(timeout_ms=int(1000 * limit_s) if action == "lock" else 0)
        # A restore without arguments goes to the GPU that the process had.
        given = None if action == "restore" else ctypes.byref(arguments)
        self._call(_ACTIONS[action], pid, given)
        return ""

    def _call(self, name: str, *arguments: object) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            text = f"driver 570 or newer is needed: {name} is missing (CUDA {self._version()})"
            raise CheckpointError(_UNABLE, text) from None
        result = function(*arguments)
        if result:
            found = ctypes.c_char_p()
            self._library.cuGetErrorName(result, ctypes.byref(found))
            reason = (found.value or b"error").decode()
            raise CheckpointError(_REFUSED, f"{name}: {reason} ({result})")

    def _version(self) -> str:
        found = ctypes.c_int(0)
        self._library.cuDriverGetVersion(ctypes.byref(found))
        return f"{found.value // 1000}.{found.value % 1000 // 10}"


def run(act: str, pid: int, limit_s: float) -> str:
    """Given what to do, do it and return what to print; raise CheckpointError."""
    users = os.environ.get(USERS)
    if act == "tid" and users is not None and str(pid) not in users.split(","):
        raise CheckpointError(_REFUSED, f"process {pid} uses no GPU")
    if act == "tid" and lacks_library(pid):
        raise CheckpointError(_REFUSED, f"process {pid} has not mapped libcuda")
    told = ask_holder(act, pid, limit_s)
    if told is None:
        return perform(Driver(), act, pid, limit_s)
    code, text = told
    if code:
        raise CheckpointError(code, text)
    return text


def perform(driver: Driver, act: str, pid: int, limit_s: float) -> str:
    """Given the driver and what to do, do it and return what to print; raise CheckpointError."""
    if act == "state":
        return driver.state(pid)
    if act == "tid":
        return driver.restore_tid(pid)
    return driver.act(act, pid, limit_s)


def ask_holder(act: str, pid: int, limit_s: float) -> tuple[int, str] | None:
    """Given what to do, let the holder do it; return the exit code with what to print, None where
    there is no holder that answers. The caller bounds the time."""
    path = os.environ.get(SOCKET)
    if not path:
        return None
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        connection.connect(path)
        connection.send(f"{act} {pid} {limit_s}".encode())
        answer = connection.recv(_MESSAGE_BYTES).decode()
    except OSError:
        return None
    finally:
        connection.close()
    code, found, text = answer.partition(" ")
    return (int(code), text) if found else None


def hold() -> int:
    """Keep the driver awake until stdin ends, and do meanwhile what is asked over the socket, one
    after the other; return the exit code."""
    driver = Driver()
    path = os.environ.get(SOCKET)
    if path:
        listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen(_BACKLOG)
        _thread.start_new_thread(serve, (listener, driver))
    while os.read(0, _MESSAGE_BYTES):
        pass
    return 0


def serve(listener: _socket.socket, driver: Driver) -> None:
    """Given a listening socket and the driver, answer every connection's one question."""
    while True:
        fd, _ = listener._accept()  # type: ignore[attr-defined]
        connection = _socket.socket(fileno=fd)
        try:
            act, pid, limit_s = connection.recv(_MESSAGE_BYTES).decode().split()
            try:
                answer = f"0 {perform(driver, act, int(pid), float(limit_s))}"
            except CheckpointError as error:
                answer = f"{error.code} {error}"
            connection.send(answer.encode())
        except (OSError, ValueError):
            pass  # who asked has gone, or does it itself
        finally:
            connection.close()


def lacks_library(pid: int) -> bool:
    """Given a PID, tell whether that process has certainly not mapped the driver's library."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - quick
            text = file.read()
    except OSError:
        return False
    return bool(text) and "/libcuda.so" not in text


def within(limit_s: float, job: Callable[[], str]) -> str:
    """Given a limit and a job, return what it returns, or raise what it raises. A job that outlasts
    the limit goes on until the process ends: a call into the driver cannot be broken off."""
    ended = _thread.allocate_lock()
    ended.acquire()
    texts: list[str] = []
    errors: list[CheckpointError] = []

    def work() -> None:
        try:
            texts.append(job())
        except CheckpointError as error:
            errors.append(error)
        finally:
            ended.release()

    _thread.start_new_thread(work, ())
    if not ended.acquire(timeout=limit_s):
        raise CheckpointError(_TIMED_OUT, f"no answer from the driver within {limit_s:g} s")
    if errors:
        raise errors[0]
    return texts[0]


def main(argv: Sequence[str]) -> int:
    """Do what the arguments say; return the exit code."""
    if not argv or {"-h", "--help"} & set(argv):
        sys.stdout.write(USAGE)
        return 0
    try:
        if list(argv) == ["--hold"]:
            return hold()
        act, pid, limit_s = parse(argv)
        grace_s = _GRACE_S if act == "lock" else 0.0
        text = within(limit_s + grace_s, lambda: run(act, pid, limit_s))
    except CheckpointError as error:
        sys.stderr.write(f"{error}\n")
        return error.code
    sys.stdout.write(f"{text}\n" if text else "")
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # whatever a thread in the driver still does
