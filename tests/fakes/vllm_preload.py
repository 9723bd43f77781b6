# SPDX-License-Identifier: Apache-2.0
"""Stands for vLLM's `preload`: a launcher, and a process for each GPU that answers over a socket.

As upstream has it: one connection after the other, pickled mappings behind a length, answers for
its own user alone, a lock for each socket, a parent whose /health looks at exit codes only. Strict
about flags. FAKE_PRELOAD_EXIT_FILE has a status to end with, FAKE_PRELOAD_GATE names a file that
loading waits for.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

BYTES = 3 << 20
LENGTH = struct.Struct("!Q")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="vllm preload", allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--model-loader-extra-config", type=json.loads, default={})
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--gpu-memory-utilization", type=float)
    parser.add_argument("--speculative-config", type=json.loads)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--disable-custom-all-reduce", action="store_true")
    parser.add_argument("--weight-cache-socket-dir", required=True)
    parser.add_argument("--weight-cache-health-host", default="0.0.0.0")
    parser.add_argument("--weight-cache-health-port", type=int)
    parser.add_argument("--weight-cache-master-port", type=int)
    args = parser.parse_args(argv)
    if args.load_format == "ipc_cache" or "fallback" in args.model_loader_extra_config:
        parser.error("the weight cache daemon itself must load from disk")
    return args


def receive(connection: socket.socket) -> Any:
    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            chunk = connection.recv(count - len(data))
            if not chunk:
                raise ConnectionError
            data += chunk
        return data

    (length,) = LENGTH.unpack(exactly(LENGTH.size))
    return pickle.loads(exactly(length))  # noqa: S301 - from a test


def send(connection: socket.socket, answer: dict[str, Any]) -> None:
    payload = pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
    connection.sendall(LENGTH.pack(len(payload)) + payload)


def ask(path: Path, request: dict[str, Any], timeout_s: float = 5.0) -> Any:
    """What an engine's worker asks of its process."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        send(connection, request)
        return receive(connection)


def serve_rank(path: Path, ready: int) -> None:
    lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    path.chmod(0o600)
    server.listen()
    print(f"rank {os.getpid()} serves {path.name}", flush=True)
    os.write(ready, b"r")
    held = BYTES
    while True:
        connection, _ = server.accept()
        with connection:
            try:
                peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                uid = struct.unpack("3i", peer)[1]
                if uid != os.getuid():
                    text = f"Rejecting weight cache connection from uid {uid}"
                    send(connection, {"status": "error", "message": text})
                    continue
                command = receive(connection)["cmd"]
                if command == "release":
                    held = 0
                send(connection, {"status": "ok", "memory_bytes": held})
            except (ConnectionError, EOFError):
                print("client disconnected", flush=True)


def main(argv: list[str]) -> None:
    args = parse(argv)
    print("preload argv " + json.dumps(argv), flush=True)
    print("preload key " + ("set" if os.environ.get("VLLM_API_KEY") else "none"), flush=True)
    ordered = Path(os.environ.get("FAKE_PRELOAD_EXIT_FILE", "/nonexistent"))
    if ordered.exists():
        sys.exit(int(ordered.read_text()))
    folder = Path(args.weight_cache_socket_dir)
    draft = args.speculative_config and "model" in args.speculative_config
    gpus = [hashlib.md5(b"GPU-%d" % rank).hexdigest() for rank in range(args.tensor_parallel_size)]  # noqa: S324
    roles = ("", "_draft")[: 2 if draft else 1]
    names = [f"vllm_weight_cache_{gpu}{role}.sock" for role in roles for gpu in gpus]
    state = {"ready": 0}
    pids = []
    gate = Path(os.environ.get("FAKE_PRELOAD_GATE", "/"))
    for name in names:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            while not gate.exists():
                time.sleep(0.05)
            serve_rank(folder / name, writer)
        os.close(writer)
        pids.append(pid)
        threading.Thread(target=lambda fd=reader: count_ready(state, fd), daemon=True).start()
    dead: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            good = state["ready"] == len(pids) and not dead
            self.send_response(200 if good else 503)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    if args.weight_cache_health_port is not None:
        address = (args.weight_cache_health_host, args.weight_cache_health_port)
        threading.Thread(target=HTTPServer(address, Handler).serve_forever, daemon=True).start()

    def on_term(*_: object) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    signal.signal(signal.SIGTERM, on_term)
    while state["ready"] < len(pids):
        time.sleep(0.05)
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended:
            dead.append(ended)
            on_term()
            sys.exit(os.waitstatus_to_exitcode(status) % 256 or 1)
    # One after the other, as upstream joins them: a later one's death is not seen.
    for pid in pids:
        os.waitpid(pid, 0)
        dead.append(pid)


def count_ready(state: dict[str, int], fd: int) -> None:
    if os.read(fd, 1):
        state["ready"] += 1


if __name__ == "__main__":
    main(sys.argv[1:])
