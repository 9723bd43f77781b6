# SPDX-License-Identifier: Apache-2.0
"""Readiness: asked of a small real HTTP server that behaves as vLLM does, or does not."""

import itertools
import json
import shutil
import socket
import socketserver
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from warmhold_entrypoint.running.readiness import (
    Event,
    ProbeError,
    Prober,
    Report,
    Target,
    build_target,
    probe_canary,
    probe_health,
    read_progress,
)
from warmhold_entrypoint.settings import read_settings

KEY = "s3cret"
TIMEOUT_S = 5.0
METRICS = b"""\
# HELP vllm:request_success_total Count of successfully processed requests.
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="demo"} 2.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="demo"} 3.0
vllm:generation_tokens_total{engine="0",model_name="demo"} 1.25e+02
vllm:prompt_tokens_total{engine="0",model_name="demo"} 10.0
vllm:num_requests_running{engine="0",model_name="demo"} 99.0
"""
Answer = tuple[int, bytes]


class FakeEngine:
    """vLLM's HTTP side: answers by path, and every request that came."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {
            "GET /health": (200, b""),
            "GET /metrics": (200, METRICS),
            "POST /v1/completions": (200, completion(1)),
        }
        self.silent = False
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                name = f"{self.command} {self.path}"
                headers = {key.lower(): value for key, value in self.headers.items()}
                engine.requests.append((name, headers, json.loads(body) if body else None))
                if engine.silent:
                    self.rfile.read(1)  # until the other side gives up
                    return
                status, text = engine.answers.get(name, (404, b'{"detail":"Not Found"}'))
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = answer  # noqa: N815 - http.server's names

            def log_message(self, *args: object) -> None:
                pass

            def address_string(self) -> str:
                return ""

        self.handler = Handler


def completion(tokens: object) -> bytes:
    return json.dumps({"usage": {"completion_tokens": tokens}}).encode()


class Server(ThreadingHTTPServer):
    def handle_error(self, *args: object) -> None:
        """A client that gives up is part of these tests."""


def serve(server: socketserver.BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def port(engine: FakeEngine) -> Iterator[int]:
    server = Server(("127.0.0.1", 0), engine.handler)
    for _ in serve(server):
        yield server.server_port


@pytest.fixture
def unused_port() -> Iterator[int]:
    """A port that is bound, so that nobody else gets it, and on which nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def target(port: int, *command: str, **variables: str) -> Target:
    settings, _, _ = read_settings(variables, ["--port", str(port), *command])
    return build_target(settings)


# How the engine is reached


@pytest.mark.parametrize(
    ("command", "url"),
    [
        ([], "http://127.0.0.1:8000"),
        (["--port", "9", "--host", "0.0.0.0"], "http://127.0.0.1:9"),
        (["--host", "::"], "http://127.0.0.1:8000"),
        (["--host", "10.0.0.1"], "http://10.0.0.1:8000"),
        (["--host", "::1"], "http://[::1]:8000"),
        (["--ssl-certfile=c", "--root-path", "/v/"], "https://127.0.0.1:8000/v"),
        (["--uds", "/run/x.sock"], "unix:///run/x.sock"),
    ],
)
def test_where_to_ask(command: list[str], url: str) -> None:
    assert build_target(read_settings({}, command)[0]).url == url


@pytest.mark.parametrize(
    ("command", "model"),
    [
        ([], "demo"),
        (["--model", "o/n"], "o/n"),
        (["--served_model_name", "first", "second"], "first"),
    ],
)
def test_whom_to_ask_for(command: list[str], model: str) -> None:
    assert build_target(read_settings({}, command)[0]).model == model


def test_a_target_shows_no_key() -> None:
    made = target(1, WARMHOLD_API_KEY=KEY)
    assert made.key == KEY
    assert KEY not in repr(made) + made.url


# Health


def test_health_needs_no_credentials(engine: FakeEngine, port: int) -> None:
    probe_health(target(port, WARMHOLD_API_KEY=KEY), TIMEOUT_S)
    ((name, headers, _),) = engine.requests
    assert name == "GET /health"
    assert "authorization" not in headers


@pytest.mark.parametrize("status", [500, 503, 404, 204, 301])
def test_every_other_status_is_unhealthy(engine: FakeEngine, port: int, status: int) -> None:
    engine.answers["GET /health"] = (status, b"" if status == 204 else b"why")
    with pytest.raises(ProbeError, match=f"GET /health: HTTP {status}") as raised:
        probe_health(target(port), TIMEOUT_S)
    assert raised.value.status == status


def test_nobody_there(unused_port: int) -> None:
    with pytest.raises(ProbeError, match="GET /health: ") as raised:
        probe_health(target(unused_port), TIMEOUT_S)
    assert raised.value.status == 0


@pytest.mark.parametrize("probe", [probe_health, probe_canary, read_progress])
def test_silence_has_a_bound(engine: FakeEngine, port: int, probe: Any) -> None:
    engine.silent = True
    with pytest.raises(ProbeError, match="timed out"):
        probe(target(port), 0.05)


# The canary


@pytest.mark.parametrize("variables", [{}, {"WARMHOLD_API_KEY": KEY}], ids=["open", "key"])
def test_the_canary_asks_for_one_token(
    engine: FakeEngine, port: int, variables: dict[str, str]
) -> None:
    made = target(port, "--served-model-name", "mine", "other", **variables)
    assert probe_canary(made, TIMEOUT_S) is True
    ((name, headers, body),) = engine.requests
    assert name == "POST /v1/completions"
    assert (body["model"], body["max_tokens"]) == ("mine", 1)
    assert headers.get("authorization") == (f"Bearer {KEY}" if variables else None)
    assert headers["content-type"] == "application/json"


def test_the_root_path_comes_first(engine: FakeEngine, port: int) -> None:
    engine.answers = {
        "GET /proxy/health": (200, b""),
        "POST /proxy/v1/completions": (200, completion(1)),
    }
    made = target(port, "--root-path", "/proxy/")
    probe_health(made, TIMEOUT_S)
    assert probe_canary(made, TIMEOUT_S) is True


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((401, b'{"error":"Unauthorized"}'), "HTTP 401"),
        ((500, b"boom"), "HTTP 500 boom"),
        ((404, b'{"error":{"message":"The model `x` does not exist."}}'), "HTTP 404"),
        ((200, completion(0)), "0 tokens for one"),
        ((200, completion(2)), "2 tokens for one"),
        ((200, completion(None)), "None tokens for one"),
        ((200, b"{}"), "no completion"),
        ((200, b"[]"), "no completion"),
        ((200, b"[" * 100_000), "no completion"),
        ((200, b'{"usage": null}'), "no completion"),
        ((200, b"<html>"), "no completion"),
        ((200, b"[" * 100_000), "no completion"),
        ((200, b""), "no completion"),
    ],
)
def test_a_canary_without_its_token_fails(
    engine: FakeEngine, port: int, answer: Answer, why: str
) -> None:
    engine.answers["POST /v1/completions"] = answer
    with pytest.raises(ProbeError, match=why):
        probe_canary(target(port), TIMEOUT_S)


def test_a_model_without_completions_has_no_canary(engine: FakeEngine, port: int) -> None:
    del engine.answers["POST /v1/completions"]
    assert probe_canary(target(port), TIMEOUT_S) is False


@pytest.mark.parametrize("key", [f"{KEY}\nx", f"{KEY}☃"])
def test_a_key_that_cannot_be_sent_is_not_told(port: int, key: str) -> None:
    made = Target("127.0.0.1", port, None, False, "", "demo", key)
    with pytest.raises(ProbeError) as raised:
        probe_canary(made, TIMEOUT_S)
    assert KEY not in str(raised.value)


# Progress


def test_progress_is_what_vllm_counts(port: int) -> None:
    assert read_progress(target(port), TIMEOUT_S) == 2 + 3 + 125 + 10


def test_no_counters_no_progress(engine: FakeEngine, port: int) -> None:
    engine.answers["GET /metrics"] = (200, b"# nothing yet\n")
    assert read_progress(target(port), TIMEOUT_S) == 0


# Other ways to the same engine


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls_with_any_certificate(engine: FakeEngine, tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    request = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=x"
    subprocess.run(
        ["openssl", *request.split(), "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
        timeout=30,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = Server(("127.0.0.1", 0), engine.handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    for _ in serve(server):
        assert probe_canary(target(server.server_port, "--ssl-certfile", "c"), TIMEOUT_S) is True
        with pytest.raises(ProbeError):
            probe_health(target(server.server_port), TIMEOUT_S)


def test_a_unix_socket(engine: FakeEngine, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    for _ in serve(socketserver.ThreadingUnixStreamServer(path, engine.handler)):
        assert probe_canary(target(1, "--uds", path), TIMEOUT_S) is True


# The prober


@pytest.fixture
def probers() -> Iterator[list[Prober]]:
    started: list[Prober] = []
    yield started
    for prober in started:
        prober.stop()
        prober._thread.join(TIMEOUT_S)


def watch(probers: list[Prober], made: Target, interval_s: float) -> Prober:
    probers.append(Prober(made, interval_s, 1.0, lambda: None))
    return probers[-1]


def take(prober: Prober, count: int) -> list[Report]:
    return [prober.reports.get(timeout=TIMEOUT_S) for _ in range(count)]


def test_listening_then_ready(engine: FakeEngine, port: int, probers: list[Prober]) -> None:
    before = time.monotonic()
    prober = watch(probers, target(port), 60)
    assert [report.event for report in take(prober, 2)] == [Event.LISTENING, Event.READY]
    assert prober.last_ok is not None and before < prober.last_ok <= time.monotonic()
    assert "POST /v1/completions" in [name for name, _, _ in engine.requests]


def test_a_dead_engine_says_so(engine: FakeEngine, port: int, probers: list[Prober]) -> None:
    prober = watch(probers, target(port), 0.02)
    take(prober, 2)
    engine.answers = dict.fromkeys(engine.answers, (503, b"EngineDeadError"))
    dead, degraded = take(prober, 2)
    assert (dead.event, degraded.event) == (Event.DEAD, Event.DEGRADED)
    assert "503" in dead.reason
    assert prober.missed >= 2


def test_an_engine_that_is_full_is_not_dead(
    engine: FakeEngine, port: int, probers: list[Prober]
) -> None:
    prober = watch(probers, target(port), 0.02)
    take(prober, 2)
    engine.answers["POST /v1/completions"] = (503, b"The engine is currently busy")
    (degraded,) = take(prober, 1)
    assert (degraded.event, "503" in degraded.reason) == (Event.DEGRADED, True)
    engine.answers["POST /v1/completions"] = (200, completion(1))
    (ready,) = take(prober, 1)
    assert ready.event is Event.READY


def test_requests_that_move_on_take_the_canarys_place(
    engine: FakeEngine, port: int, probers: list[Prober]
) -> None:
    counted = itertools.count(1)

    class Counting(dict[str, Answer]):
        def get(self, name: str, *default: Any) -> Any:
            if name == "GET /metrics":
                return 200, b"vllm:prompt_tokens_total{} %d" % next(counted)
            return super().get(name, *default)

    engine.answers = Counting(engine.answers)
    prober = watch(probers, target(port), 0.01)
    take(prober, 2)
    deadline = time.monotonic() + TIMEOUT_S
    names: list[str] = []
    while names.count("GET /metrics") < 10 and time.monotonic() < deadline:
        time.sleep(0.01)
        names = [name for name, _, _ in engine.requests]
    assert names.count("GET /metrics") >= 10
    assert names.count("POST /v1/completions") == 1
