# SPDX-License-Identifier: Apache-2.0
"""Whether supervisord itself is alive: asked over its control socket, whatever the engine does."""

import http.client
import socket
from pathlib import Path

_TIMEOUT_S = 15.0
# Name and password as conf.py writes them; the socket's mode is what protects it.
_HEADERS = {"Content-Type": "text/xml", "Authorization": "Basic d2FybWhvbGQ6d2FybWhvbGQ="}
_GET_STATE = (
    "<?xml version='1.0'?><methodCall><methodName>supervisor.getState</methodName></methodCall>"
)


def is_alive(run_dir: Path) -> bool:
    """Given the run directory, tell whether supervisord answers a call and is running."""
    connection = http.client.HTTPConnection("localhost", timeout=_TIMEOUT_S)
    try:
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(_TIMEOUT_S)
        connection.sock.connect(str(run_dir / "supervisor.sock"))
        connection.request("POST", "/RPC2", _GET_STATE, _HEADERS)
        return b"RUNNING" in connection.getresponse().read(1 << 16)
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
