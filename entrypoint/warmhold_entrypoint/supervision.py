# SPDX-License-Identifier: Apache-2.0
"""Whether supervisord itself is alive: asked over its control socket, whatever the engine does.

One XML-RPC call of fixed text, written by hand: an HTTP client's import would delay every start.
"""

import socket
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
