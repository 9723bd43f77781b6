# SPDX-License-Identifier: Apache-2.0
"""How criu is called, and what it said when it failed. Nothing here knows what a snapshot is.

The flags; without any of the second to the fifth a dump of `tests/contract/small_tree.py` fails:
--leave-running      the engine goes on serving after a dump
--tcp-established    processes of one engine talk over loopback connections
--skip-in-flight     connections that nobody accepted yet are not the snapshot's
--link-remap         a POSIX semaphore's file is open under a name that is gone
--file-locks         compile caches are locked with flock
--ghost-limit        deleted files that are still open travel in the image up to this size
--network-lock=skip  both ends of every connection are in the tree (the scans see to it) and stand
                     still. Locking would cost a run of iptables per connection and direction while
                     the engine is frozen, and a criu that is killed would leave them locked.
--manage-cgroups=ignore  another container has another cgroup; the caller's is the right one
With `plugins`, for an engine on a GPU:
--libdir             where cuda_plugin.so lies
--timeout            for stopping the tree, in which the plug-in moves the GPU's state to the host
Not used: --ext-unix-sk (nothing may be connected to outside), --shell-job (the tree has its own
sessions, and no terminal).
Sources: criu(8); criu/config.c, criu/cr-dump.c, criu/net.c of CRIU 4.2.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from . import cuda
from .errors import SnapshotError

PROGRAM = "criu"
DUMP_LOG, RESTORE_LOG = "dump.log", "restore.log"
_KEY_LINES, _TAIL_LINES = 80, 40
_KILLED_S = 2.0
# What criu says on every run in a container, and what does not matter there.
_HARMLESS = re.compile(
    r"tun: Unable to create tun|Can't setup RLIMIT_NOFILE|ns_last_pid sysctl is inaccessible"
    r"|Failed to launch cuda-checkpoint to retrieve restore tid"  # of a process without CUDA
)
_KEY = re.compile(r"\b(Error|Warn(ing)?)\b", re.IGNORECASE)
_STATISTIC = re.compile(r"^(\w[\w ]*): (\d+)(?: us)?$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """A call that ended with 0: its wall time and what it printed."""

    seconds: float
    output: str


def build_dump_argv(
    root_pid: int,
    images: Path,
    work: Path,
    script: Path,
    ghost_limit_bytes: int,
    plugins: Path | None = None,
) -> list[str]:
    """Given the tree's root, the image folder, the log's folder, the post-dump script and, for an
    engine on a GPU, the folder of plug-ins, return the argv of a dump that leaves the tree running.
    """
    freeze = () if plugins is None else ("--timeout", str(cuda.FREEZE_S))
    return [
        *(PROGRAM, "dump", "--tree", str(root_pid), "--leave-running", "--tcp-established"),
        *("--skip-in-flight", "--link-remap", "--file-locks"),
        *("--ghost-limit", str(ghost_limit_bytes), "--action-script", str(script)),
        *freeze,
        *_common(images, work, DUMP_LOG, plugins),
    ]


def build_restore_argv(
    images: Path,
    work: Path,
    pidfile: Path,
    inherit: Mapping[int, int],
    plugins: Path | None = None,
    script: Path | None = None,
) -> list[str]:
    """Given image and log folders, a file for the root's PID, descriptors by the inode of the pipe
    each stands in for and, for an engine on a GPU, the folder of plug-ins, return the argv of a
    restore that ends when the tree runs; before that the script has its say, where there is one."""
    stands_in = [f"fd[{fd}]:pipe:[{inode}]" for inode, fd in inherit.items()]
    return [
        *(PROGRAM, "restore", "--restore-detached", "--pidfile", str(pidfile)),
        *("--tcp-established", "--link-remap", "--file-locks"),
        *(word for value in stands_in for word in ("--inherit-fd", value)),
        *(() if script is None else ("--action-script", str(script))),
        *_common(images, work, RESTORE_LOG, plugins),
    ]


def run(
    argv: Sequence[str],
    timeout_s: float,
    log: Path | None = None,
    pass_fds: Sequence[int] = (),
    variables: Mapping[str, str] | None = None,
) -> Outcome:
    """Given an argv, a limit, the log that criu writes and variables for its environment, run it to
    its end.

    A criu that is killed in a dump may leave processes that it has stopped broken. So it gets a
    session of its own, where a terminal's Ctrl-C does not reach it, and whoever interrupts the
    caller still has to wait for its end.
    Raise SnapshotError `snapshot.criu` with the log's key lines where it ends with another code,
    `snapshot.timeout` where it outlasts its limit and is killed, and `snapshot.criu-absent` where
    there is none. What a killed criu leaves is the caller's to end.
    """
    began = time.monotonic()
    try:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=tuple(pass_fds),
            env={**os.environ, **(variables or {})},
            start_new_session=True,
        )
    except OSError as error:
        detail = f"{argv[0]} cannot be started: {error.strerror}"
        remedy = "use the warmhold image: it brings its own criu"
        raise SnapshotError("snapshot.criu-absent", detail, remedy) from error
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        output = _kill(process)
        detail = f"criu {argv[1]} did not end within {timeout_s:g} s"
        lines = read_key_lines(log, output)
        raise SnapshotError("snapshot.timeout", detail, "see the lines above", lines) from error
    except BaseException:
        try:
            process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _kill(process)
        raise
    if process.returncode != 0:
        lines = read_key_lines(log, output)
        detail = f"criu {argv[1]} ended with {process.returncode}: {find_reason(lines)}"
        raise SnapshotError("snapshot.criu", detail, "see the lines above", lines)
    return Outcome(time.monotonic() - began, output)


def read_version(timeout_s: float = 10.0) -> str:
    """Return criu's version, as 4.2.1; raise SnapshotError as `run` does."""
    output = run([PROGRAM, "--version"], timeout_s).output
    match = re.search(r"^Version: (\S+)", output, re.MULTILINE)
    return match[1] if match else output.strip()


def run_check(timeout_s: float = 30.0) -> None:
    """Ask criu whether the kernel has what it needs; raise SnapshotError as `run` does.

    In an unprivileged container it always ends with 1, because /proc/sys is read-only there: it
    writes ns_last_pid only on kernels without clone3. So every error but that counts.
    """
    try:
        run([PROGRAM, "check"], timeout_s)
    except SnapshotError as error:
        if error.code != "snapshot.criu" or find_errors(error.lines):
            raise


def read_key_lines(log: Path | None, output: str) -> list[str]:
    """Given criu's log and what it printed, return the lines worth showing."""
    try:
        text = "" if log is None else log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return key_lines(f"{text}\n{output}")


def key_lines(text: str) -> list[str]:
    """Given a log, return its errors and warnings (the last 80 at most), then its last 40 lines."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    tail_from = max(0, len(lines) - _TAIL_LINES)
    key = [line for line in lines[:tail_from] if _KEY.search(line) and not _HARMLESS.search(line)]
    return [*key[-_KEY_LINES:], *lines[tail_from:]]


def find_reason(lines: Sequence[str]) -> str:
    """Given key lines, return the first error among them without time stamp and place."""
    errors = find_errors(lines)
    if errors:
        return re.sub(r"^\(\d+\.\d+\)\s*(\d+: )?|Error \([^)]*\): ", "", errors[0]).strip()
    return lines[-1].strip() if lines else "it said nothing"


def find_errors(lines: Sequence[str]) -> list[str]:
    """Given key lines, return the errors among them that matter in a container."""
    return [line for line in lines if re.search(r"\bError\b", line) and not _HARMLESS.search(line)]


def parse_statistics(output: str) -> dict[str, int]:
    """Given what --display-stats printed, return its numbers (times in microseconds) by name."""
    return {name: int(number) for name, number in _STATISTIC.findall(output)}


def _common(images: Path, work: Path, log: str, plugins: Path | None) -> list[str]:
    return [
        *(() if plugins is None else ("--libdir", str(plugins))),
        *(
            "--network-lock=skip",
            "--manage-cgroups=ignore",
            "--images-dir",
            str(images),
            "--work-dir",
            str(work),
        ),
        *("--log-file", log, "-v3", "--display-stats"),
    ]


def _kill(process: "subprocess.Popen[str]") -> str:
    """Kill criu and the script that it may be waiting for; return what it printed.

    A part of a tree that it was making may have its pipe still, and is ended by the caller only
    after this; what it printed is then lost, its log is not.
    """
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=_KILLED_S)[0]
    except subprocess.TimeoutExpired:
        return ""
