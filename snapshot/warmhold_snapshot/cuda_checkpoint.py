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
answer from there they do it themselves. A question is a line with WARMHOLD_CUDA_PIDS ("-" where it
is not set) and a line for each argument, an answer the exit code, a space and what is to be said.
An image's `cuda-checkpoint` is `cuda_checkpoint.c`, which asks like that and has no interpreter to
start; this file lies beside it as `cuda-checkpoint.py`.

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
_PATIENCE_S = 150.0  # with the holder, whose own limits are shorter
_GRACE_S = 5.0  # so that the driver's own limit of a lock comes first
_REFUSED, _UNABLE, _TIMED_OUT = 1, 2, 124
_MESSAGE_BYTES, _BACKLOG = 1 << 12, 16
_UNKNOWN = "-"  # in the place of who uses a GPU
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


def answer(argv: Sequence[str], users: str, driver: Driver | None = None) -> tuple[int, str]:
    """Given the arguments, who uses a GPU ("-": nobody knows) and the driver where it is held, do
    it; return the exit code and what to print."""
    try:
        act, pid, limit_s = parse(argv)
        if act == "tid":
            require_user(pid, users)
        grace_s = _GRACE_S if act == "lock" else 0.0
        return 0, within(limit_s + grace_s, lambda: perform(driver, act, pid, limit_s))
    except CheckpointError as error:
        return error.code, str(error)


def require_user(pid: int, users: str) -> None:
    """Given a PID and who uses a GPU, raise CheckpointError where that process has no CUDA."""
    if users != _UNKNOWN and str(pid) not in users.split(","):
        raise CheckpointError(_REFUSED, f"process {pid} uses no GPU")
    if lacks_library(pid):
        raise CheckpointError(_REFUSED, f"process {pid} has not mapped libcuda")


def perform(driver: Driver | None, act: str, pid: int, limit_s: float) -> str:
    """Given the driver, or none yet, and what to do, do it and return what to print; raise
    CheckpointError."""
    driver = driver or Driver()
    if act == "state":
        return driver.state(pid)
    if act == "tid":
        return driver.restore_tid(pid)
    return driver.act(act, pid, limit_s)


def ask_holder(argv: Sequence[str], users: str) -> tuple[int, str] | None:
    """Given the arguments and who uses a GPU, let the holder do it; return the exit code and what
    to print, None where there is no holder that answers."""
    path = os.environ.get(SOCKET)
    if not path:
        return None
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    connection.settimeout(_PATIENCE_S)
    try:
        connection.connect(path)
        connection.send("\n".join([users, *argv]).encode())
        connection.shutdown(_socket.SHUT_WR)
        said = receive(connection)
    except OSError:
        return None
    finally:
        connection.close()
    code, found, text = said.partition(" ")
    return (int(code), text) if found else None


def receive(connection: _socket.socket) -> str:
    """Given a connection, return all that comes over it."""
    said = b""
    while part := connection.recv(_MESSAGE_BYTES):
        said += part
    return said.decode()


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
            users, *argv = receive(connection).split("\n")
            code, text = answer(argv, users, driver)
            connection.send(f"{code} {text}".encode())
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
    if list(argv) == ["--hold"]:
        try:
            return hold()
        except CheckpointError as error:
            code, text = error.code, str(error)
    else:
        users = os.environ.get(USERS, _UNKNOWN)
        code, text = ask_holder(argv, users) or answer(argv, users)
    (sys.stderr if code else sys.stdout).write(f"{text}\n" if text else "")
    return code


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # whatever a thread in the driver still does
