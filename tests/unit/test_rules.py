# SPDX-License-Identifier: Apache-2.0
"""Rules of the house that a machine can hold: imports, names, sizes, headers, compose files."""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from warmhold_entrypoint.container import pid1
from warmhold_entrypoint.running import ending
from warmhold_entrypoint.settings import FIELDS, PREFIX, SECRETS, read_settings

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "warmhold_entrypoint": ROOT / "entrypoint" / "warmhold_entrypoint",
    "warmhold_snapshot": ROOT / "snapshot" / "warmhold_snapshot",
    "warmhold_wcache": ROOT / "wcache" / "warmhold_wcache",
}
MAY_IMPORT = {
    "warmhold_entrypoint": {"warmhold_snapshot", "warmhold_wcache"},
    "warmhold_snapshot": set(),
    "warmhold_wcache": set(),
}
HEAVY = {"torch", "vllm"}
PLUGIN = PACKAGES["warmhold_wcache"] / "vllm_plugin"
MODULES = sorted(path for folder in PACKAGES.values() for path in folder.rglob("*.py"))
MAX_LINES = 400
NOT_SOURCE = {"build", "dist", "node_modules", "wheels"}
# Read by compose itself or by docker/host.sh, and meaningless inside the container.
COMPOSE_ONLY = {
    f"{PREFIX}{name}"
    for name in (
        *("BIND", "BUILD_NETWORK", "CA_BUNDLE", "GPUS", "IMAGE", "MEMORY", "MODELS", "PORT"),
        *("SHM_SIZE", "TORCH_CPU_INDEX", "WHEELS"),
    )
}
# Where volumes are mounted, which compose.yaml itself decides.
FIXED_BY_VOLUMES = {f"{PREFIX}{name}" for name in ("STATE_DIR", "MODELS_DIR", "RUN_DIR")}
SETTINGS = {PREFIX + name.upper() for name in FIELDS}
SETTINGS |= {f"{PREFIX}{name.upper()}_FILE" for name in SECRETS}

Compose = dict[str, Any]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(path: Path) -> set[str]:
    """The top-level names that a module imports, also inside functions; relative ones are left."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


# Modules


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports(path: Path) -> None:
    (package,) = (name for name, folder in PACKAGES.items() if path.is_relative_to(folder))
    names = imported(path)
    assert names & set(PACKAGES) - {package} <= MAY_IMPORT[package]
    assert not names & HEAVY or path.is_relative_to(PLUGIN)


def test_no_relative_import_leaves_its_package() -> None:
    for path in MODULES:
        (folder,) = (folder for folder in PACKAGES.values() if path.is_relative_to(folder))
        depth = len(path.relative_to(folder).parts)
        levels = [
            node.level
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
        ]
        assert max(levels, default=0) <= depth, name_of(path)


def test_the_walk_sees_imports(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("import torch.cuda as c\ndef f():\n  from vllm.x import y\n")
    assert imported(tmp_path / "m.py") == HEAVY
    assert len(MODULES) > 20


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_size_and_name(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES
    for part in path.relative_to(ROOT).with_suffix("").parts:
        assert not re.search(r"util|manager|helper|common", part)


def sources() -> Iterator[Path]:
    """Files of the checkout that carry a header, without what is built or installed in it."""
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [
            name
            for name in folders
            if name not in NOT_SOURCE and (not name.startswith(".") or name in {".ci", ".github"})
        ]
        for name in files:
            if name.endswith((".py", ".sh", ".yaml", ".yml")) or name.startswith("Dockerfile"):
                yield Path(folder, name)


@pytest.mark.parametrize("path", sorted(sources()), ids=name_of)
def test_header(path: Path) -> None:
    first = path.read_text().splitlines()[:2]
    assert "# SPDX-License-Identifier: Apache-2.0" in first


# Compose files


class Loader(yaml.SafeLoader):
    """YAML with compose's own tag; what it resets becomes None."""


Loader.add_constructor("!reset", lambda loader, node: None)


def read_compose(name: str) -> Compose:
    document = yaml.load((ROOT / name).read_text(), Loader)  # noqa: S506 - a safe loader
    return document["services"]["warmhold"]


@pytest.fixture
def compose() -> Compose:
    return read_compose("compose.yaml")


def test_variables_of_the_container_are_settings(compose: Compose) -> None:
    passed = {name for name in compose["environment"] if name.startswith(PREFIX)}
    assert passed <= SETTINGS
    assert passed >= {f"{PREFIX}{name}" for name in ("MODE", "MODEL", "ENGINE_ARGS", "API_KEY")}


def test_every_setting_of_the_host_reaches_the_container(compose: Compose) -> None:
    """Set in .env and not passed on, a setting would be ignored without a word."""
    plain = {PREFIX + name.upper() for name in FIELDS}
    assert plain - FIXED_BY_VOLUMES - set(compose["environment"]) == set()


def test_variables_that_compose_reads_are_known() -> None:
    text = (ROOT / "compose.yaml").read_text()
    read = set(re.findall(r"\$\{(\w+)", text))
    assert read <= COMPOSE_ONLY | SETTINGS
    assert not COMPOSE_ONLY & SETTINGS


def test_defaults_in_compose_are_those_of_the_settings(compose: Compose) -> None:
    for name, value in compose["environment"].items():
        if value is not None:
            default = re.fullmatch(rf"\$\{{{name}:-(.*)\}}", value)
            assert default, value
            field = FIELDS[name.removeprefix(PREFIX).lower()]
            assert default[1] == str(field.default)


def seconds(text: str, drain_s: int | None) -> int:
    """Given a Go duration in minutes and seconds with compose's variable, return its seconds."""
    shown = re.sub(
        rf"\$\{{{PREFIX}DRAIN_S:-(\d+)\}}",
        lambda match: match[1] if drain_s is None else str(drain_s),
        text,
    )
    match = re.fullmatch(r"(?:(\d+)m)?(\d+)s", shown)
    assert match, shown
    return 60 * int(match[1] or 0) + int(match[2])


@pytest.mark.parametrize("drain_s", [None, 0, 1, 30, 59, 60, 300, 3600])
def test_who_stops_waits_longer_than_who_is_stopped(compose: Compose, drain_s: int | None) -> None:
    grace_s = seconds(compose["stop_grace_period"], drain_s)
    environ = {} if drain_s is None else {f"{PREFIX}DRAIN_S": str(drain_s)}
    settings, faults, _ = read_settings(environ, ())
    assert faults == []
    stop_wait_s, runner_s = settings.stop_wait_s, settings.env.drain_s + ending.MARGIN_S
    assert grace_s > stop_wait_s > runner_s > settings.env.drain_s
    assert grace_s > stop_wait_s + pid1._KILL_TIMEOUT_S


@pytest.mark.parametrize("name", ["compose.yaml", "compose.plain.yaml"])
def test_no_device_is_reserved(name: str) -> None:
    reserving = {"deploy", "devices", "device_cgroup_rules", "gpus", "privileged", "runtime"}
    assert not reserving & set(read_compose(name))


def test_one_gpu_is_reserved_by_one_file() -> None:
    gpu = read_compose("compose.gpu.yaml")
    (device,) = gpu["deploy"]["resources"]["reservations"]["devices"]
    count = "${WARMHOLD_GPUS:-1}"
    assert device == {"driver": "nvidia", "count": count, "capabilities": ["gpu"]}
    assert gpu["build"]["target"] == "cuda"
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    assert " AS cuda\n" in dockerfile
    named = re.findall(r"\$\{(\w+)", (ROOT / "compose.gpu.yaml").read_text())
    assert named == [f"{PREFIX}IMAGE", f"{PREFIX}GPUS"]


def test_rights_are_given_and_can_be_taken(compose: Compose) -> None:
    assert set(compose["cap_add"]) == {"SYS_ADMIN", "SYS_PTRACE", "NET_ADMIN", "SYS_TIME"}
    assert compose["security_opt"] == ["seccomp=unconfined"]
    assert read_compose("compose.plain.yaml") == {"cap_add": None, "security_opt": None}
    text = (ROOT / "compose.plain.yaml").read_text()
    assert re.findall(r"(\w+): !reset \[\]", text) == ["cap_add", "security_opt"]


def test_the_port_is_the_hosts_own_by_default(compose: Compose) -> None:
    assert compose["ports"] == [f"${{{PREFIX}BIND:-127.0.0.1}}:${{{PREFIX}PORT:-8000}}:8000"]
