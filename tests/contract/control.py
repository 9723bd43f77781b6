# SPDX-License-Identifier: Apache-2.0
"""The control socket of a real `vllm serve` on a CPU: with the vault, and with vLLM's own loader.

    docker run --rm --shm-size 1g ... --entrypoint python warmhold:cpu tests/contract/control.py

Prints a line per check and ends with 1 where one fails. `control.py held foreign servers` names the
parts; the last starts two API servers and does not run by default.
"""

import json
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import stand
from serve import PORT, Server, count_mapped_segments, count_sockets
from warmhold_wcache.control_client import ControlClient, ControlError
from warmhold_wcache.protocol import encode

LONG_S = 300.0  # the first log-probability compiles a kernel, and CPUs may be shared
PROMPT = [*range(100, 108)]
WEIGHTS = ["--load-format", "warmhold", "--model-loader-extra-config"]
failures: list[str] = []


def check(name: str, holds: bool, seen: object = "") -> None:
    """Print a check; what was seen says why it failed."""
    print(f"{'ok  ' if holds else 'FAIL'} {name} {seen}", flush=True)
    if not holds:
        failures.append(name)


def code_of(act: Callable[..., Any], *arguments: Any) -> str:
    """The code of the error that a call ends in; its answer where it does not."""
    try:
        return repr(act(*arguments))
    except ControlError as error:
        print(f"     {error} (fix: {error.remedy})", flush=True)
        return error.code


class Background:
    """A completion in a thread of its own."""

    def __init__(self, server: Server, count: int) -> None:
        self.result: tuple[int, Any] = (0, None)
        self._thread = threading.Thread(target=self._run, args=(server, count))
        self._thread.start()

    def _run(self, server: Server, count: int) -> None:
        self.result = server.complete("Once upon a time", count, ignore_eos=True)

    def join(self) -> tuple[int, Any]:
        self._thread.join()
        return self.result


def begin(server: Server, client: ControlClient, count: int) -> Background:
    """Start a completion, and return once the engine has it."""
    background = Background(server, count)
    deadline = time.monotonic() + 60
    while not client.state(LONG_S)["engine_requests"]:
        assert time.monotonic() < deadline
    return background


def check_quiesced(server: Server, client: ControlClient) -> None:
    body = {"model": stand.MODEL, "prompt": "x", "max_tokens": 1}
    status, headers, _ = server.http("POST", "/v1/completions", body)
    print(f"     {status} {headers}", flush=True)
    check("quiesced: 503", status == 503, status)
    close = headers.get("connection") == "close"
    check("with Retry-After and Connection: close", close and "retry-after" in headers)
    status, _, _ = server.http("POST", "/v1/completions", {**body, "prompt": "x" * (8 << 20)})
    check("to 8 MiB as well", status == 503, status)
    status, _, _ = server.http("POST", "/v1/completions", body, key=None)
    check("without the key 401 as ever", status == 401, status)
    for path in ("/health", "/metrics", "/ping"):
        check(f"{path} answers", server.http("GET", path)[0] == 200)
    check("no canary", code_of(client.canary) == "control.quiesced")
    check("no segment is mapped", count_mapped_segments(server.process.pid) == 0)
    check("no connection is open", count_sockets(server.control) == 1)
    state = client.state(LONG_S)
    generations = [row for worker in state["workers"] for row in worker["generations"]]
    unmapped = bool(generations) and not any(row["mapped"] for row in generations)
    check("the state says so", state["quiesced"] and unmapped, state)
    check("twice is fine", client.quiesce()["quiesced"])


def check_held() -> None:
    vault = stand.Vault()
    server = Server(*WEIGHTS, json.dumps(vault.extra()))
    print(f"     served after {server.start_s:.1f} s", flush=True)
    client = ControlClient(server.control)
    try:
        mode = stat.S_IMODE(server.control.stat().st_mode)
        check("the socket's mode", mode == 0o600, oct(mode))
        state = client.state(LONG_S)
        segments = count_mapped_segments(server.process.pid)
        check("serving, with mapped weights", state["phase"] == "serving" and segments > 0, state)
        check_canary(server, client)
        before = [server.complete(text, 16) for text in ("Water boils at", "One, two, three,")]
        check("completions", all(status == 200 for status, _ in before))
        long = begin(server, client, 100)
        check("a drain that is too short", code_of(client.quiesce, 0.5) == "control.busy")
        check("leaves the engine serving", client.state(LONG_S)["phase"] == "serving")
        check("meanwhile others are served", server.complete("x", 1)[0] == 200)
        status, tokens = long.join()
        check("and cuts nothing", status == 200 and len(tokens) == 100, status)
        short = begin(server, client, 20)
        answer = client.quiesce(LONG_S)
        print(f"     quiesced: {answer['seconds']}", flush=True)
        status, tokens = short.join()
        check("a drain waits for what runs", status == 200 and len(tokens) == 20, status)
        check_quiesced(server, client)
        answer = client.resume()
        print(f"     resumed: {answer['seconds']}", flush=True)
        check("resumed", not answer["quiesced"] and not client.resume()["quiesced"], answer)
        after = [server.complete(text, 16) for text in ("Water boils at", "One, two, three,")]
        check("tokens and log-probabilities are equal", after == before)
        check("the canary answers", client.canary(LONG_S)["ok"])
        rounds = [(client.quiesce()["seconds"], client.resume()["seconds"]) for _ in range(5)]
        print(f"     five rounds: {rounds}", flush=True)
        check("tokens are equal still", server.complete("Water boils at", 16) == before[0])
        check_leaving(server, client)
        check_without_vault(client, vault)
        show_log(server)
        check_stop(server)
    finally:
        server.stop()
        vault.stop()


def check_canary(server: Server, client: ControlClient) -> None:
    status, _, _ = server.http("GET", "/v1/models", key=None)
    check("HTTP without the key: 401", status == 401, status)
    bare = client.canary(LONG_S, with_logprob=False)
    print(f"     without the log-probability: {bare}", flush=True)
    canary = client.canary(LONG_S)
    print(f"     with it, at first: {canary}", flush=True)
    same = client.canary(LONG_S)
    check("the canary is the same again", same["logprob"] == canary["logprob"], same)
    check("without it too", (bare["token"], bare["logprob"]) == (same["token"], None))
    _, ((text, logprob),) = server.complete(PROMPT, 1)
    check("and what HTTP answers", (text, logprob) == (canary["text"], canary["logprob"]), text)
    check("a prompt of its own", client.canary(LONG_S, [1, 2, 3])["token"] >= 0)
    check("its limit", code_of(client.canary, 0.001) == "control.timeout")
    check(
        "a token beyond the vocabulary",
        code_of(client.canary, LONG_S, [1 << 30]) == "control.failed",
    )
    state = client.state(LONG_S)
    check("nothing is left of them", state["requests"] == state["engine_requests"] == 0, state)


def connect(server: Server) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(server.control))
    return sock


def check_leaving(server: Server, client: ControlClient) -> None:
    for verb in ("canary", "quiesce", "state"):
        with connect(server) as sock:
            sock.sendall(encode({"verb": verb, "prompt": [*range(256)]}))
    deadline = time.monotonic() + 60
    while client.state(LONG_S)["requests"] or count_sockets(server.control) > 1:
        assert time.monotonic() < deadline
    client.resume()  # whichever way the quiesce went
    state = client.state(LONG_S)
    check("clients that leave leave nothing behind", state["engine_requests"] == 0, state)
    check("and it serves", server.complete("x", 1)[0] == 200)


def check_stop(server: Server) -> None:
    with connect(server):
        began = time.monotonic()
        server.stop()
        seconds = time.monotonic() - began
    code = server.process.returncode
    check("quiesced, and with a silent client, it stops", code == 0, f"{code}, {seconds:.1f} s")


def check_without_vault(client: ControlClient, vault: stand.Vault) -> None:
    client.quiesce()
    vault.stop()
    check("without the vault, no resume", code_of(client.resume) == "control.failed")
    check("it stays quiesced", client.state(LONG_S)["quiesced"])


def check_foreign() -> None:
    server = Server()
    client = ControlClient(server.control)
    try:
        print(f"     {client.canary(LONG_S)}", flush=True)
        state = client.state(LONG_S)
        check("vLLM's own loader: unsupported", bool(state["unsupported"]), state)
        check("quiesce says so", code_of(client.quiesce) == "control.unsupported")
        check("and changes nothing", server.complete("x", 1)[0] == 200)
        show_log(server)
    finally:
        server.stop()


def check_servers() -> None:
    vault = stand.Vault()
    server = Server(*WEIGHTS, json.dumps(vault.extra()), "--api-server-count", "2")
    client = ControlClient(server.control)
    try:
        check("two API servers, one socket", count_sockets(server.control) == 1)
        print(f"     {client.canary(LONG_S)}", flush=True)
        check("no quiesce", code_of(client.quiesce) == "control.unsupported", client.state(LONG_S))
        check("it serves", server.complete("x", 1)[0] == 200)
        show_log(server)
    finally:
        server.stop()
        vault.stop()


def show_log(server: Server) -> None:
    """What the engine said of the control socket, and what it should not have said."""
    lines = server.log().splitlines()
    shown = [line for line in lines if "control" in line or "ERROR" in line or "Traceback" in line]
    print("\n".join(f"     | {line}" for line in shown[-60:]), flush=True)
    check("no error in the engine's log", not any(" ERROR " in line for line in lines))


def main() -> int:
    parts = {"held": check_held, "foreign": check_foreign, "servers": check_servers}
    for name in sys.argv[1:] or ["held", "foreign"]:
        print(f"== {name} on port {PORT}", flush=True)
        parts[name]()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
