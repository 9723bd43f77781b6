# SPDX-License-Identifier: Apache-2.0
"""supervisord's process: begun before there is a configuration, and asked whether it is alive.

Its imports take longer than all else that comes before the engine, so they run beside the plan; the
configuration's path follows on its standard input, and the end of that input ends it.
The question is one XML-RPC call of fixed text: an HTTP client's import would delay every start.
"""

import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_TIMEOUT_S = 15.0
_CALL = (
    b"<?xml version='1.0'?><methodCall><methodName>supervisor.getState</methodName></methodCall>"
)
# Name and password as conf.py writes them; the socket's mode is what protects it.
_REQUEST = (
    b"POST /RPC2 HTTP/1.0\r\nContent-Type: text/xml\r\n"
    b"Authorization: Basic d2FybWhvbGQ6d2FybWhvbGQ=\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_CALL), _CALL)
)


def is_alive(run_dir: Path) -> bool:
    """Given the run directory, tell whether supervisord answers a call and is running."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT_S)
        try:
            connection.connect(str(run_dir / "supervisor.sock"))
            connection.sendall(_REQUEST)
            answer = b""
            while chunk := connection.recv(4096):
                answer += chunk
        except OSError:
            return False
    return b"RUNNING" in answer


def begin_supervisord() -> "subprocess.Popen[bytes]":
    """Start a process that imports supervisord and then waits for `go_on`."""
    argv = [sys.executable, "-m", "warmhold_entrypoint.supervision"]
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
