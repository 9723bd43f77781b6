# SPDX-License-Identifier: Apache-2.0
"""Containers of the built image: one stack with the real engine for all, small ones with the fake.

Every start of the real engine is counted from the containers' own logs, printed at the end, and
bounded by `test_zz_budget.py`.
"""

import json
import os
import platform
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from box import EAGER, KILLS, REAL_STARTS, Box, RealStack
from stack import ROOT, free_port
from testcontainers.compose import DockerCompose

import docker
from docker import DockerClient

IMAGE = os.environ.get("WARMHOLD_IMAGE", "warmhold:cpu")


@pytest.fixture(scope="session")
def engine() -> DockerClient:
    return docker.from_env()


@pytest.fixture
def run_fake(engine: DockerClient) -> Iterator[Callable[..., Box]]:
    """Run the image with the small engine in vLLM's place; `options` are docker run's."""
    boxes: list[Box] = []

    def run(*command: str, environment: dict[str, str] | None = None, **options: object) -> Box:
        fakes = {
            str(ROOT / "tests/fakes/vllm"): {"bind": "/opt/warmhold/venv/bin/vllm", "mode": "ro"}
        }
        volumes = {**fakes, **options.pop("volumes", {})}  # type: ignore[dict-item]
        arguments = {"shm_size": "512m", "volumes": volumes, "environment": environment or {}}
        container = engine.containers.run(
            IMAGE, list(command), detach=True, **{**arguments, **options}
        )
        boxes.append(Box(container))
        return boxes[-1]

    yield run
    for box in boxes:
        box.container.remove(force=True, v=True)


def compose_stack(
    engine: DockerClient, name: str, folder: Path, files: list[str], environment: dict[str, str]
) -> Iterator[RealStack]:
    """A stack of the shipped compose file under its own project name, removed with its volumes."""
    port = free_port()
    settings = {
        "COMPOSE_PROJECT_NAME": name,
        "WARMHOLD_PORT": str(port),
        "WARMHOLD_KV_CACHE_GIB": "1",
        "WARMHOLD_SNAPSHOT": "manual",  # none that comes while a test looks at something else
        **environment,
    }
    # A file, because variables of this process would reach every other stack too.
    env_file = folder / f"{name}.env"
    env_file.write_text("".join(f"{variable}={value}\n" for variable, value in settings.items()))
    compose = DockerCompose(ROOT, compose_file_name=files, env_file=str(env_file), wait=True)
    stack = RealStack(compose, engine, port)
    try:
        try:
            compose.start()
        except Exception:
            print(stack.log()[-8000:])
            raise
        yield stack
    finally:
        REAL_STARTS[name] = stack.log().count("engine starting")
        compose.stop(down=True)


@pytest.fixture(scope="session")
def real(engine: DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealStack]:
    """The default: `docker compose up --wait` with the demo model, compiled, from empty caches."""
    folder = tmp_path_factory.mktemp("real")
    yield from compose_stack(engine, "warmhold-test", folder, ["compose.yaml"], {})


@pytest.fixture(scope="session")
def eager(engine: DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealStack]:
    """With all rights and without compilation, for snapshots."""
    folder = tmp_path_factory.mktemp("eager")
    override = folder / "override.yaml"
    override.write_text(json.dumps({"services": {"warmhold": {"command": EAGER}}}))
    files = ["compose.yaml", str(override)]
    yield from compose_stack(engine, "warmhold-eager", folder, files, {"HF_TOKEN": "hf_secret42"})


@pytest.fixture(scope="session")
def guarded(engine: DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealStack]:
    """All that differs from the default: no extra rights, TLS, key, path, uid, hub cache."""
    folder = tmp_path_factory.mktemp("guarded")
    override = RealStack.write_guarded_override(folder)
    files = ["compose.yaml", "compose.plain.yaml", str(override)]
    environment = {
        "WARMHOLD_API_KEY": "sk-container-42",
        "WARMHOLD_ENGINE_UID": "10001",
        "WARMHOLD_MODELS": str(RealStack.copy_demo_to_hub_cache(engine, IMAGE, folder)),
        "WARMHOLD_MODEL": "warmhold/demo",
        "HF_HUB_OFFLINE": "1",
    }
    yield from compose_stack(engine, "warmhold-guarded", folder, files, environment)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if REAL_STARTS:
        counts = ", ".join(f"{name} {count}" for name, count in REAL_STARTS.items())
        terminalreporter.write_line(f"real engine starts: {sum(REAL_STARTS.values())} ({counts})")
    folder = os.environ.get("WARMHOLD_TEST_REPORT_DIR")
    if folder:
        path = ROOT / folder / f"test-full-{datetime.now(UTC):%Y-%m-%d}.md"
        path.write_text(build_report(terminalreporter), encoding="utf-8")
        terminalreporter.write_line(f"report: {path.relative_to(ROOT)}")


def build_report(reporter: pytest.TerminalReporter) -> str:
    """The session as a dated page: machine, image, outcomes, and every restart after a kill."""
    image = docker.from_env().images.get(IMAGE)
    counts = {name: len(reporter.getreports(name)) for name in ("passed", "failed", "error")}
    lines = [
        f"# `make test-full`, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "",
        f"- kernel {platform.release()}, {os.cpu_count()} CPUs, Docker"
        f" {docker.from_env().version()['Version']}, image {image.short_id}",
        f"- container tests: {', '.join(f'{count} {name}' for name, count in counts.items())}",
        f"- real engine starts: {sum(REAL_STARTS.values())} {REAL_STARTS}",
        "",
        "| killed | pass | restart to first token, s | private memory before, MiB | after, MiB |",
        "|---|---|---|---|---|",
        *(
            f"| {kill.kind} | {index + 1} | {kill.total_s:.1f} | {kill.before} | {kill.after} |"
            for index, kill in enumerate(KILLS)
        ),
        "",
        "| test | outcome | s |",
        "|---|---|---|",
        *(
            f"| `{item.nodeid.rpartition('::')[2]}` | {item.outcome} | {item.duration:.1f} |"
            for name in ("passed", "failed")
            for item in reporter.getreports(name)
        ),
        "",
    ]
    return "\n".join(lines)
