# SPDX-License-Identifier: Apache-2.0
"""`/health` over HTTP: 200 when the vault answered a round trip just now, 503 when it did not.

A process of its own, so that neither its memory nor its clients are the vault's. Loopback only.
"""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from .client import VaultClient
from .errors import WcacheError

HOST = "127.0.0.1"
_CLIENT_TIMEOUT_S = 10.0


def ask_health(socket_path: Path, timeout_s: float) -> tuple[int, str]:
    """Given the vault's socket, return an HTTP status and a line that says why."""
    try:
        with VaultClient(socket_path, timeout_s) as client:
            answer = client.hello()
    except WcacheError as error:
        return 503, f"{error.code}: {error.detail}\n"
    return 200, f"alive: pid {answer['pid']}, {answer['generations']} generation(s)\n"


def make_server(port: int, socket_path: Path, timeout_s: float) -> ThreadingHTTPServer:
    """Given a port of the loopback address, return a server of `/health` that is not run yet."""

    class Handler(BaseHTTPRequestHandler):
        timeout = _CLIENT_TIMEOUT_S

        def do_GET(self) -> None:
            if self.path != "/health":
                self.send_error(404)
                return
            status, text = ask_health(socket_path, timeout_s)
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: a probe comes every few seconds."""

    return ThreadingHTTPServer((HOST, port), Handler)
