# SPDX-License-Identifier: Apache-2.0
"""The launcher: its filter, run here by a small interpreter, and a real process that it starts."""

import errno
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from warmhold_entrypoint import launcher

ALLOW = "allow"
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
FOREIGN = {"i386": 0x40000003, "arm": 0x40000028, "riscv64": 0xC00000F3}
# From asm/unistd_64.h and asm-generic/unistd.h, not from the launcher's own table.
NUMBERS = {
    "x86_64": {
        **{"read": 0, "write": 1, "mmap": 9, "clone": 56, "execve": 59, "epoll_wait": 232},
        **{"ptrace": 101, "mount": 165, "umount2": 166, "pivot_root": 155, "bpf": 321},
        **{"keyctl": 250, "add_key": 248, "request_key": 249, "init_module": 175},
        **{"finit_module": 313, "delete_module": 176, "kexec_load": 246, "kexec_file_load": 320},
    },
    "aarch64": {
        **{"read": 63, "write": 64, "mmap": 222, "clone": 220, "execve": 221, "epoll_wait": 22},
        **{"ptrace": 117, "mount": 40, "umount2": 39, "pivot_root": 41, "bpf": 280},
        **{"keyctl": 219, "add_key": 217, "request_key": 218, "init_module": 105},
        **{"finit_module": 273, "delete_module": 106, "kexec_load": 104, "kexec_file_load": 294},
    },
}
COMMON = {
    **{"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427},
    **{"open_tree": 428, "move_mount": 429, "fsopen": 430, "fsmount": 432},
    **{"pidfd_open": 434, "clone3": 435, "openat2": 437},
}
HARMLESS = {
    *("read", "write", "mmap", "clone", "execve", "epoll_wait", "pidfd_open", "clone3", "openat2")
}
MACHINES = sorted(ARCHITECTURES)


def run_filter(program: bytes, architecture: int, number: int) -> str:
    """Given classic BPF, return what it answers to a system call: `allow` or an errno's name."""
    data = struct.pack("=iIQ6Q", number, architecture, 0, *([0] * 6))  # struct seccomp_data
    code = list(struct.iter_unpack("=HBBI", program))
    accumulator = position = 0
    while True:
        operation, if_true, if_false, value = code[position]
        position += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif operation == 0x15:
            position += if_true if accumulator == value else if_false
        elif operation == 0x35:
            position += if_true if accumulator >= value else if_false
        else:
            assert operation == 0x06, hex(operation)
            if value == 0x7FFF0000:
                return ALLOW
            assert value & 0xFFFF0000 == 0x00050000, hex(value)
            return errno.errorcode[value & 0xFFFF]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("call", sorted(NUMBERS["x86_64"] | COMMON))
def test_answers(machine: str, call: str) -> None:
    number = (NUMBERS[machine] | COMMON)[call]
    answer = run_filter(launcher.build_filter(machine), ARCHITECTURES[machine], number)
    if call.startswith("io_uring"):
        assert answer == "ENOSYS"
    else:
        assert answer == (ALLOW if call in HARMLESS else "EPERM")


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("architecture", [*FOREIGN.values(), *ARCHITECTURES.values()])
def test_calls_of_another_architecture_do_not_exist(machine: str, architecture: int) -> None:
    own = architecture == ARCHITECTURES[machine]
    for call in ("read", "mount"):
        answer = run_filter(launcher.build_filter(machine), architecture, NUMBERS[machine][call])
        assert (answer == "ENOSYS") is not own


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("number", [0x40000000, 0x40000001, 0x40000000 + 165, 0xFFFFFFFF])
def test_x32_calls_do_not_exist(machine: str, number: int) -> None:
    signed = number - (1 << 32) if number >= 1 << 31 else number
    program = launcher.build_filter(machine)
    assert run_filter(program, ARCHITECTURES[machine], signed) == "ENOSYS"


def test_the_table_is_the_one_that_is_tested() -> None:
    assert set(launcher._MACHINES) == set(MACHINES)
    with pytest.raises(KeyError):
        launcher.build_filter("riscv64")


@pytest.mark.parametrize("machine", MACHINES)
def test_the_kernel_takes_programs_of_this_size(machine: str) -> None:
    program = launcher.build_filter(machine)
    assert len(program) % 8 == 0
    assert len(program) // 8 <= 4096


# A real process


def launch(*program: str) -> subprocess.CompletedProcess[str]:
    request = [str(os.getuid()), "30631"]
    script = str(Path(launcher.__file__))
    return subprocess.run(
        [sys.executable, "-I", "-S", script, *request, *program],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_a_launched_process_has_no_rights_left() -> None:
    done = launch("cat", "/proc/self/status")
    assert done.returncode == 0, done.stderr
    status = dict(line.split(":\t", 1) for line in done.stdout.splitlines() if ":\t" in line)
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert int(status[name], 16) == 0, name
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2" or "without its seccomp filter" in done.stderr
    # A user without rights can neither empty the bounding set nor set the group.
    if os.getuid() == 0:
        assert int(status["CapBnd"], 16) == 0
        assert status["Groups"].split() == ["30631"]


def test_a_launched_process_has_its_own_session() -> None:
    done = launch(sys.executable, "-c", "import os; print(os.getsid(0) == os.getpid())")
    assert done.stdout == "True\n", done.stderr


def test_a_launched_vault_has_no_secret(tmp_path: Path) -> None:
    script = str(Path(launcher.__file__))
    secrets = {"HF_TOKEN": "s3cret", "WARMHOLD_API_KEY": "s3cret", "VLLM_API_KEY": "s3cret"}
    done = subprocess.run(
        [
            *(sys.executable, "-I", "-S", script, "--listen", str(tmp_path / "wcache.sock")),
            *(str(os.getuid()), "none", "env"),
        ],
        env={**os.environ, **secrets, "PYTHONPATH": "/code", "LC_ALL": "C"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert {"PYTHONPATH=/code", "LC_ALL=C"} <= set(done.stdout.splitlines()), done.stderr
    assert "s3cret" not in done.stdout


SHOW_SOCKET = 'readlink /proc/$$/fd/3; grep " $1" /proc/net/unix; id -u; id -G'


@pytest.mark.parametrize("uid", [0, 12345])
def test_a_launched_vault_inherits_its_socket_and_no_mark(tmp_path: Path, uid: int) -> None:
    path = tmp_path / "wcache.sock"
    path.write_text("left by an earlier one")
    script = str(Path(launcher.__file__))
    done = subprocess.run(
        [
            *(sys.executable, "-I", "-S", script, "--listen", str(path), str(uid), "none"),
            *("/bin/sh", "-c", SHOW_SOCKET, "sh", str(path)),
        ],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    link, entry, *ids = done.stdout.splitlines()
    flags, _, _, inode, _ = entry.split()[3:]
    assert (link, flags) == (f"socket:[{inode}]", "00010000"), "listening, as descriptor 3"
    assert ids == [str(uid), str(uid)], "no group but the user's own"
    status = path.stat()
    assert (status.st_uid, status.st_mode & 0o7777) == (uid, 0o600)


@pytest.mark.parametrize(("mode", "code"), [(None, 127), (0o644, 126)])
def test_a_program_that_cannot_be_run(tmp_path: Path, mode: int | None, code: int) -> None:
    path = tmp_path / "program"
    if mode is not None:
        path.touch(mode)
    done = launch(str(path))
    assert done.returncode == code
    assert str(path) in done.stderr
    assert "Traceback" not in done.stderr
