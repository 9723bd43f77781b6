# SPDX-License-Identifier: Apache-2.0
"""The supervision's Prometheus metrics over HTTP, only where a port was asked for."""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from .status import ask_status, build_metrics

_TIMEOUT_S = 3.0


def serve_metrics(port: int, run_dir: Path) -> None:
    """Given a port and the run directory, answer GET /metrics on all addresses until killed."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            if self.path != "/metrics":
                self.send_error(404)
                return
            body = build_metrics(ask_status(run_dir, _TIMEOUT_S)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Scrapes are not worth a line each."""

    ThreadingHTTPServer(("", port), Handler).serve_forever()  # asked for by WARMHOLD_METRICS_PORT
