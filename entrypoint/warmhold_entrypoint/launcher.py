# SPDX-License-Identifier: Apache-2.0
"""Takes every right away from a process and then becomes the engine, or the vault.

Run as a script by the runner, with the standard library alone and without site-packages, because it
stands between the runner and the engine at each start:

    python -I -S launcher.py [--listen PATH] UID GROUP program argument...

With `--listen` the program inherits a Unix socket that listens at PATH (mode 0600, the user's) as
descriptor 3: afterwards it has no right to make one in a folder of root's. It gets no secret of the
environment: an engine has its user and its lack of rights, and may read it in /proc. GROUP `none`
leaves the process unmarked: what is not of an engine must not be swept with one.

Afterwards the process has empty capability sets (bounding set too), `no_new_privs`, its own
session, no group but the given one, and a seccomp filter. The filter lets io_uring answer ENOSYS
(CRIU cannot dump a ring; libuv falls back to epoll) and denies what model code must not do to the
host.
Sources: linux/prctl.h, linux/capability.h, linux/seccomp.h, linux/audit.h.
"""

import ctypes
import errno
import os
import resource
import struct
import sys
from contextlib import suppress

PROGRAM = __file__
_PR_CAPBSET_DROP = 24
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522

LISTEN_FD = 3
# All that the vault needs of the environment, besides what Python or the locale is told.
_KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG", "TZ")
_KEPT_PREFIXES = ("PYTHON", "LC_")
_BACKLOG = 512

_LOAD_WORD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_JUMP_GREATER_EQUAL = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_X32_BIT = 0x40000000

# Audit architecture and system call numbers, as asm/unistd.h has them for each machine.
_MACHINES: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {
            "ptrace": 101,
            "pivot_root": 155,
            "mount": 165,
            "umount2": 166,
            "init_module": 175,
            "delete_module": 176,
            "kexec_load": 246,
            "add_key": 248,
            "request_key": 249,
            "keyctl": 250,
            "finit_module": 313,
            "kexec_file_load": 320,
            "bpf": 321,
            "open_tree": 428,
            "move_mount": 429,
            "fsopen": 430,
            "fsconfig": 431,
            "fsmount": 432,
            "fspick": 433,
            "mount_setattr": 442,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "umount2": 39,
            "mount": 40,
            "pivot_root": 41,
            "kexec_load": 104,
            "init_module": 105,
            "delete_module": 106,
            "ptrace": 117,
            "add_key": 217,
            "request_key": 218,
            "keyctl": 219,
            "finit_module": 273,
            "bpf": 280,
            "kexec_file_load": 294,
            "open_tree": 428,
            "move_mount": 429,
            "fsopen": 430,
            "fsconfig": 431,
            "fsmount": 432,
            "fspick": 433,
            "mount_setattr": 442,
        },
    ),
}
_IO_URING = (425, 426, 427)  # setup, enter, register: the same on every machine


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def build_filter(machine: str) -> bytes:
    """Given a machine as `uname -m` names it, return the filter as classic BPF instructions.

    System calls of another architecture (32-bit, x32) answer ENOSYS: their numbers differ.
    Raise KeyError for a machine that is not in the table.
    """
    architecture, denied = _MACHINES[machine]
    refuse = [(number, errno.ENOSYS) for number in _IO_URING]
    refuse += [(number, errno.EPERM) for number in sorted(denied.values())]
    program = [
        _instruction(_LOAD_WORD, 0, 0, 4),  # seccomp_data.arch
        _instruction(_JUMP_EQUAL, 1, 0, architecture),
        _instruction(_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        _instruction(_LOAD_WORD, 0, 0, 0),  # seccomp_data.nr
        _instruction(_JUMP_GREATER_EQUAL, 0, 1, _X32_BIT),
        _instruction(_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
    ]
    for number, answer in refuse:
        program.append(_instruction(_JUMP_EQUAL, 0, 1, number))
        program.append(_instruction(_RETURN, 0, 0, _ERRNO | answer))
    program.append(_instruction(_RETURN, 0, 0, _ALLOW))
    return b"".join(program)


def drop_rights(uid: int, group: int | None, libc: ctypes.CDLL) -> None:
    """Given the uid and the marking group (or none), give up every capability.

    Raise OSError where that fails. Without CAP_SETGID the group is left out (`tree` then follows
    parents instead), and without CAP_SETPCAP the bounding set stays, which `no_new_privs` makes
    harmless.
    """
    with suppress(PermissionError):
        os.setgroups([] if group is None else [group])
    _prctl(libc, _PR_SET_NO_NEW_PRIVS, 1)
    with suppress(PermissionError):
        for capability in range(_last_capability() + 1):
            _prctl(libc, _PR_CAPBSET_DROP, capability)
    _prctl(libc, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    if uid != os.getuid():
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    if libc.capset(header, bytes(24)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def set_filter(libc: ctypes.CDLL) -> bool:
    """Set the seccomp filter; tell whether the kernel took it."""
    try:
        instructions = build_filter(os.uname().machine)
    except KeyError:
        return False
    program = _Program(len(instructions) // 8, instructions)
    return bool(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) == 0)


def listen(path: str, uid: int) -> None:
    """Given a path and a user, leave a socket that listens there as descriptor 3."""
    import socket  # an engine needs none, and its start would pay for it

    with suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108 - no pathlib, as below
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    listener.bind(path)
    os.umask(mask)
    if uid != os.getuid():
        os.chown(path, uid, -1)
    listener.listen(_BACKLOG)
    # supervisord gives its programs no descriptor above 2, so this one is free.
    if listener.fileno() == LISTEN_FD:
        os.set_inheritable(LISTEN_FD, True)
    else:
        os.dup2(listener.fileno(), LISTEN_FD)
    listener.detach()


def load_libc() -> ctypes.CDLL:
    """Return the C library with errno kept."""
    return ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Drop all rights and exec the given program; end with 126 or 127 as a shell does."""
    arguments = sys.argv[1:]
    path = None
    if arguments[0] == "--listen":
        path, arguments = arguments[1], arguments[2:]
    uid, program = int(arguments[0]), arguments[2:]
    group = None if arguments[1] == "none" else int(arguments[1])
    libc = load_libc()
    # supervisord makes each program the leader of a process group, which cannot have a new session.
    with suppress(PermissionError):
        os.setsid()
    environment = dict(os.environ)
    if path is not None:
        listen(path, uid)
        environment = {name: text for name, text in environment.items() if _is_kept(name)}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    drop_rights(uid, group, libc)
    if not set_filter(libc):
        sys.stderr.write(f"warmhold.launcher: {program[0]} runs without its seccomp filter\n")
    try:
        os.execvpe(program[0], program, environment)  # noqa: S606 - becoming the engine is this script's purpose
    except OSError as error:
        sys.stderr.write(f"warmhold.launcher: {program[0]}: {error.strerror}\n")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


def _is_kept(name: str) -> bool:
    return name in _KEPT or name.startswith(_KEPT_PREFIXES)


def _instruction(code: int, jump_true: int, jump_false: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, jump_true, jump_false, value)


def _prctl(libc: ctypes.CDLL, option: int, value: int) -> None:
    if libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")


def _last_capability() -> int:
    # pathlib would cost the start 10 ms here
    with open("/proc/sys/kernel/cap_last_cap", encoding="ascii") as file:  # noqa: PTH123
        return int(file.read())


if __name__ == "__main__":
    main()
