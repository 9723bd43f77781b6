# SPDX-License-Identifier: Apache-2.0
"""The program `cuda-checkpoint` as CRIU's plug-in runs it, over a driver without a GPU."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_cuda import build_fake_cuda
from warmhold_snapshot import cuda_checkpoint
from warmhold_snapshot.cuda_checkpoint import CheckpointError, parse

PLUGIN_BUFFER = 127
NOBODY = "4194305"  # above all PIDs: its maps cannot be read, so that the driver is asked
_VARIABLES = {"PIDS": cuda_checkpoint.USERS, "SOCKET": cuda_checkpoint.SOCKET}
_STARTED: dict[str, list[str]] = {}
Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_fake_cuda(tmp_path_factory.mktemp("cuda")).parent


@pytest.fixture(scope="module", params=["image", "alone"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """How it is started: as an image has it, and without the part that is no Python."""
    source = Path(cuda_checkpoint.__file__)
    if request.param == "alone":
        return [sys.executable, "-IS", str(source)]
    folder = tmp_path_factory.mktemp("bin")
    built, beside = folder / "cuda-checkpoint", folder / "cuda-checkpoint.py"
    strict = ["-Wall", "-Wextra", "-Werror", "-O2"]
    client = source.parents[1] / "cuda_checkpoint.c"
    subprocess.run(["gcc", *strict, "-o", str(built), str(client)], check=True, timeout=60)
    body = source.read_text().partition("\n")[2]
    beside.write_text(f"#!{sys.executable} -IS\n{body}")
    beside.chmod(0o755)
    return [str(built)]


@pytest.fixture(autouse=True)
def started(program: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_STARTED, "program", program)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """What stands for process 42: a state's number."""
    path = tmp_path / "state"
    path.write_text("0")
    yield path


def call(library: Path, state: Path, *arguments: str, **environment: str) -> Done:
    """Run it as its first line says; both outputs are one, as the plug-in reads them."""
    return subprocess.run(
        [*_STARTED["program"], *arguments],
        env={
            "LD_LIBRARY_PATH": str(library),
            "FAKE_CUDA_STATE": str(state),
            **{
                _VARIABLES.get(name, f"FAKE_CUDA_{name}"): value
                for name, value in environment.items()
            },
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=20,
        check=False,
    )


@pytest.fixture
def run(library: Path, state: Path) -> Run:
    def run_it(*arguments: str, **environment: str) -> Done:
        return call(library, state, *arguments, **environment)

    return run_it


def test_a_whole_round(run: Run) -> None:
    said = []
    for action in ("", "lock", "checkpoint", "restore", "unlock"):
        if action:
            done = run("--action", action, "--pid", "42")
            assert done.returncode == 0, done.stdout
            assert done.stdout == ("42 10000\n" if action == "lock" else "")  # the driver's print
        done = run("--get-state", "--pid", "42")
        said.append(done.stdout)
        assert done.returncode == 0
    assert said == ["running\n", "locked\n", "checkpointed\n", "locked\n", "running\n"]


def test_the_failed_state_has_its_name(run: Run, state: Path) -> None:
    state.write_text("3")
    assert run("--get-state", "--pid", "42").stdout == "failed\n"


def test_the_restore_thread(run: Run) -> None:
    done = run("--get-restore-tid", "--pid", NOBODY)
    assert (done.returncode, int(done.stdout)) == (0, int(NOBODY) + 7)


def test_a_process_that_has_not_loaded_the_driver_is_not_asked_about(run: Run) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        done = run("--get-restore-tid", "--pid", str(child.pid))
        child.kill()
    assert (done.returncode, done.stdout) == (1, f"process {child.pid} has not mapped libcuda\n")


def test_who_uses_no_gpu_is_left_out(library: Path, state: Path) -> None:
    def ask(pid: str) -> Done:
        return call(library, state, "--get-restore-tid", "--pid", pid, PIDS=f"42,{NOBODY}")

    assert ask(NOBODY).returncode == 0
    done = ask("2")
    assert (done.returncode, done.stdout) == (1, "process 2 uses no GPU\n")


@contextmanager
def holding(library: Path, state: Path, socket: Path) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(
        [*_STARTED["program"], "--hold"],
        env={
            "LD_LIBRARY_PATH": str(library),
            "FAKE_CUDA_STATE": str(state),
            cuda_checkpoint.SOCKET: str(socket),
        },
        stdin=subprocess.PIPE,
    ) as holder:
        while not socket.exists():
            assert holder.poll() is None
        yield holder
        holder.communicate()


def test_the_driver_is_held_until_stdin_ends(library: Path, state: Path, tmp_path: Path) -> None:
    with holding(library, state, tmp_path / "socket") as holder:
        time.sleep(0.2)
        assert holder.poll() is None
    assert holder.returncode == 0
    assert call(tmp_path, tmp_path, "--hold").returncode == 2


def test_the_holder_does_what_calls_ask_for(library: Path, state: Path, tmp_path: Path) -> None:
    """They need no driver themselves then."""
    socket = tmp_path / "socket"

    def ask(*arguments: str) -> tuple[int, str]:
        done = call(tmp_path, tmp_path / "none", *arguments, SOCKET=str(socket))
        return done.returncode, done.stdout

    with holding(library, state, socket):
        assert ask("--get-state", "--pid", "42") == (0, "running\n")
        assert ask("--get-restore-tid", "--pid", NOBODY) == (0, f"{int(NOBODY) + 7}\n")
        assert ask("--get-state", "--pid", "x") == (2, "--pid needs a number, not 'x'\n")
        done = call(
            *(tmp_path, state, "--get-restore-tid", "--pid", NOBODY),
            **{"PIDS": "42", "SOCKET": str(socket)},
        )
        assert (done.returncode, done.stdout) == (1, f"process {NOBODY} uses no GPU\n")
        for action, after in (
            ("lock", "1"),
            ("checkpoint", "2"),
            ("restore", "1"),
            ("unlock", "0"),
        ):
            assert ask("--action", action, "--pid", "42") == (0, "")
            assert state.read_text() == after
        text = "cuCheckpointProcessCheckpoint: CUDA_ERROR_ILLEGAL_STATE (401)\n"
        assert ask("--action", "checkpoint", "--pid", "42") == (1, text)
    code, said = ask("--get-state", "--pid", "42")
    assert (code, said.startswith("no NVIDIA driver here")) == (2, True)
    assert call(library, state, "--get-state", "--pid", "42", SOCKET=str(socket)).returncode == 0


def test_an_image_s_program_starts_no_interpreter(
    program: list[str], library: Path, state: Path, tmp_path: Path
) -> None:
    if len(program) > 1:
        pytest.skip("it is the interpreter's")
    alone, socket = tmp_path / "cuda-checkpoint", tmp_path / "socket"
    shutil.copy(program[0], alone)

    def ask() -> Done:
        return subprocess.run(
            [str(alone), "--get-state", "--pid", "42"],
            env={cuda_checkpoint.SOCKET: str(socket)},
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )

    with holding(library, state, socket):
        done = ask()
    assert (done.returncode, done.stdout) == (0, "running\n")
    done = ask()
    assert (done.returncode, "cuda-checkpoint.py" in done.stderr) == (2, True)
    for arguments in ([], ["-h"], ["--help"]):
        said = subprocess.run([str(alone), *arguments], capture_output=True, text=True, timeout=20)
        assert (said.returncode, said.stdout) == (0, cuda_checkpoint.USAGE)


def test_help_is_what_the_plugin_looks_for(library: Path, tmp_path: Path) -> None:
    """It asks with -h, on machines without a driver too, and wants 0 and the flag's name."""
    for arguments in (["-h"], ["--help"], []):
        done = call(tmp_path, tmp_path, *arguments)
        assert (done.returncode, "--action" in done.stdout) == (0, True)


def test_a_locks_limit_reaches_the_driver(run: Run) -> None:
    assert run("--action", "lock", "--pid", "42", "--timeout", "2500").stdout == "42 2500\n"


@pytest.mark.parametrize("what", [["--get-state"], ["--get-restore-tid"], ["--action", "lock"]])
def test_a_process_without_cuda(run: Run, state: Path, what: list[str]) -> None:
    state.unlink()
    done = run(*what, "--pid", NOBODY)
    assert done.returncode == 1
    assert done.stdout.endswith(": CUDA_ERROR_NOT_INITIALIZED (3)\n")


def test_a_wrong_order_is_refused(run: Run, state: Path) -> None:
    done = run("--action", "checkpoint", "--pid", "42")
    text = "cuCheckpointProcessCheckpoint: CUDA_ERROR_ILLEGAL_STATE (401)\n"
    assert (done.returncode, done.stdout) == (1, text)
    assert state.read_text() == "0"


def test_an_error_without_a_name(run: Run) -> None:
    done = run("--get-state", "--pid", "42", ABSENT="1")
    assert (done.returncode, done.stdout) == (1, "cuInit: error (100)\n")


@pytest.mark.parametrize("action", ["checkpoint", "restore", "unlock"])
def test_a_call_that_does_not_end_is_left(run: Run, state: Path, action: str) -> None:
    state.write_text({"restore": "2"}.get(action, "1"))
    done = run("--action", action, "--pid", "42", "--timeout", "300", SLOW="10000")
    assert done.returncode == 124
    assert done.stdout == "no answer from the driver within 0.3 s\n"


def test_without_a_driver(tmp_path: Path) -> None:
    done = call(tmp_path, tmp_path, "--get-state", "--pid", "42")
    assert done.returncode == 2
    assert done.stdout.startswith("no NVIDIA driver here: libcuda.so.1")
    assert len(done.stdout) <= PLUGIN_BUFFER


@pytest.mark.parametrize("what", [["--get-state"], ["--get-restore-tid"], ["--action", "lock"]])
def test_a_driver_that_is_too_old(tmp_path: Path, what: list[str]) -> None:
    build_fake_cuda(tmp_path, "NO_CHECKPOINT")
    done = call(tmp_path, tmp_path, *what, "--pid", NOBODY)
    assert done.returncode == 2
    assert done.stdout.startswith("driver 570 or newer is needed: cuCheckpointProcess")
    assert done.stdout.endswith("is missing (CUDA 12.4)\n")
    assert len(done.stdout) <= PLUGIN_BUFFER


@pytest.mark.parametrize(
    "argv",
    [
        ["--pid", "42"],
        ["--get-state"],
        ["--get-state", "--pid"],
        ["--get-state", "--pid", "x"],
        ["--get-state", "--pid", "0"],
        ["--action", "toggle", "--pid", "42"],
        ["--action", "lock", "--pid", "42", "--timeout", "-1"],
        ["--toggle", "--pid", "42"],
    ],
)
def test_arguments_that_make_no_sense(argv: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(argv)
    assert caught.value.code == 2


def test_limits() -> None:
    assert parse(["-p", "7", "--get-state"]) == ("state", 7, 10.0)
    assert parse(["--action", "restore", "--pid", "7"]) == ("restore", 7, 120.0)
    assert parse(["--action", "restore", "-p", "7", "-t", "1500"]) == ("restore", 7, 1.5)
