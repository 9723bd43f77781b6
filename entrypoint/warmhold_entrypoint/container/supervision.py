# SPDX-License-Identifier: Apache-2.0
"""supervisord's process: begun before there is a configuration, and asked whether it is alive.

Its imports take longer than all else that comes before the engine, so they run beside the plan; the
configuration's path follows on its standard input, and the end of that input ends it.
The question is one XML-RPC call by hand: an HTTP client's import would delay every start.
"""

import os
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TIMEOUT_S = 15.0
_STOP_TIMEOUT_S = 30.0  # more than a program's `stopwaitsecs`
_CALL = (
    b"<?xml version='1.0'?><methodCall><methodName>supervisor.getState</methodName></methodCall>"
)
# Name and password as conf.py writes them; the socket's mode is what protects it.
_REQUEST = (
    b"POST /RPC2 HTTP/1.0\r\nContent-Type: text/xml\r\n"
    b"Authorization: Basic d2FybWhvbGQ6d2FybWhvbGQ=\r\n"
    b"Content-Length: %d\r\n\r\n%s"
)
_UP = ("STARTING", "RUNNING", "BACKOFF", "STOPPING")


@dataclass(frozen=True)
class Program:
    """A program as supervisord has it: whether it is up, and the status that it ended with."""

    up: bool
    status: int


class SupervisionError(Exception):
    """supervisord does not answer, or refuses."""


def is_alive(run_dir: Path) -> bool:
    """Given the run directory, tell whether supervisord answers a call and is running."""
    try:
        return b"RUNNING" in _post(run_dir, _CALL, _TIMEOUT_S)
    except OSError:
        return False


def start_program(run_dir: Path, name: str) -> None:
    """Given a program's name, have supervisord start it; raise SupervisionError."""
    _call(run_dir, "startProcess", name, False)


def stop_program(run_dir: Path, name: str) -> None:
    """Given a program's name, have supervisord stop it, and wait for its end; raise
    SupervisionError."""
    if read_program(run_dir, name).up:
        _call(run_dir, "stopProcess", name, True)


def read_program(run_dir: Path, name: str) -> Program:
    """Given a program's name, return how it is; raise SupervisionError."""
    info = _call(run_dir, "getProcessInfo", name)
    return Program(info["statename"] in _UP, int(info["exitstatus"]))


def _call(run_dir: Path, method: str, *parameters: object) -> Any:
    from xml.parsers.expat import ExpatError
    from xmlrpc.client import Error, dumps, loads  # brings an HTTP client along

    body = dumps(parameters, f"supervisor.{method}").encode()  # type: ignore[arg-type]
    try:
        answer = _post(run_dir, body, _STOP_TIMEOUT_S).partition(b"\r\n\r\n")[2]
        return loads(answer)[0][0]
    except (OSError, ExpatError, Error, IndexError) as error:
        raise SupervisionError(f"supervisord, {method} {parameters[0]}: {error}") from error


def _post(run_dir: Path, body: bytes, timeout_s: float) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(run_dir / "supervisor.sock"))
        connection.sendall(_REQUEST % (len(body), body))
        answer = b""
        while chunk := connection.recv(4096):
            answer += chunk
    return answer


def begin_supervisord() -> "subprocess.Popen[bytes]":
    """Start a process that imports supervisord and then waits for `go_on`."""
    argv = [sys.executable, "-m", "warmhold_entrypoint.container.supervision"]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)


def go_on(supervisord: "subprocess.Popen[bytes]", conf: Path) -> None:
    """Given the process and its configuration, let it supervise; one that has ended is no error."""
    assert supervisord.stdin is not None
    with suppress(BrokenPipeError), supervisord.stdin as stdin:
        stdin.write(os.fsencode(conf))


def main() -> None:
    """Become supervisord once its configuration's path is there."""
    from supervisor import supervisord

    conf = sys.stdin.read()
    if conf:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        supervisord.main(["-c", conf])


if __name__ == "__main__":
    main()
