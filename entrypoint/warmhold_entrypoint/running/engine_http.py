# SPDX-License-Identifier: Apache-2.0
"""One HTTP request to the engine: where it listens, over TLS or a socket file, within a bound.

The HTTP client is imported by the first request, which comes after the engine was started.
"""

import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from http.client import HTTPConnection

_MAX_ANSWER_BYTES = 4 << 20


@dataclass(frozen=True)
class Target:
    """Where and how the engine is asked; `key` is sent as a bearer token, to the canary alone."""

    host: str
    port: int
    uds: str | None
    tls: bool
    root_path: str
    model: str
    key: str | None = field(repr=False)

    @property
    def url(self) -> str:
        """The engine's address inside the container."""
        if self.uds:
            return f"unix://{self.uds}{self.root_path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.root_path}"


class ProbeError(Exception):
    """The engine did not answer as a serving one does; `status` is the HTTP status, 0 for none."""

    def __init__(self, message: str, status: int = 0) -> None:
        self.status = status
        super().__init__(message)


def request(
    target: Target, method: str, path: str, timeout_s: float, body: str | None = None
) -> bytes:
    """Ask once on a connection of its own; return the answer, raise ProbeError for all but 200."""
    from http.client import HTTPException

    headers = {"Connection": "close"}
    if body is not None:
        headers["Content-Type"] = "application/json"
        if target.key:
            headers["Authorization"] = f"Bearer {target.key}"
    connection = _connect(target, timeout_s)
    try:
        connection.request(method, target.root_path + path, body, headers)
        response = connection.getresponse()
        answer = response.read(_MAX_ANSWER_BYTES)
    except ValueError:
        raise ProbeError(f"{method} {path}: the API key cannot be sent") from None
    except (OSError, HTTPException) as error:
        raise ProbeError(f"{method} {path}: {error or type(error).__name__}") from error
    finally:
        connection.close()
    if response.status != 200:
        text = answer[:200].decode(errors="replace")
        raise ProbeError(f"{method} {path}: HTTP {response.status} {text}", response.status)
    return answer


def _connect(target: Target, timeout_s: float) -> "HTTPConnection":
    from http.client import HTTPConnection, HTTPSConnection

    if target.uds:
        connection = HTTPConnection("localhost", timeout=timeout_s)
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(timeout_s)
        try:
            connection.sock.connect(target.uds)
        except OSError as error:
            connection.close()
            raise ProbeError(f"{target.uds}: {error}") from error
        return connection
    if target.tls:
        import ssl

        # The certificate is the user's, for his own host name; over loopback it proves nothing.
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return HTTPSConnection(target.host, target.port, timeout=timeout_s, context=context)
    return HTTPConnection(target.host, target.port, timeout=timeout_s)
