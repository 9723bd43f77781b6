# SPDX-License-Identifier: Apache-2.0
"""What is read of the machine: limits of either cgroup version, and who holds a port."""

import dataclasses
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from warmhold_entrypoint import facts
from warmhold_entrypoint.model import Model
from warmhold_entrypoint.settings import read_settings

HOST_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(facts, "_CGROUP", tmp_path)
    (tmp_path / "cpu").mkdir()
    (tmp_path / "memory").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "50000 100000\n"}, 0.5),
        ({"cpu.max": "250000 100000\n"}, 2.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_cpu_quota(cgroup: Path, files: dict[str, str], quota: float | None) -> None:
    for name, text in files.items():
        (cgroup / name).write_text(text)
    assert facts.read_cpu_quota() == quota


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("memory.max", "1048576\n", (1 << 20, "cgroup limit")),
        ("memory.max", "max\n", (HOST_BYTES, "host memory")),
        ("memory.max", f"{HOST_BYTES * 2}\n", (HOST_BYTES, "host memory")),
        ("memory/memory.limit_in_bytes", "1048576\n", (1 << 20, "cgroup limit")),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", (HOST_BYTES, "host memory")),
        ("nothing", "", (HOST_BYTES, "host memory")),
    ],
)
def test_memory_limit(cgroup: Path, name: str, text: str, limit: tuple[int, str]) -> None:
    (cgroup / name).write_text(text)
    assert facts.read_memory_limit() == limit


@pytest.mark.parametrize(
    ("name", "text", "kills"),
    [
        ("memory.events", "low 0\nhigh 0\nmax 9\noom 4\noom_kill 3\noom_group_kill 0\n", 3),
        ("memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n", 2),
        ("nothing", "", 0),
    ],
)
def test_oom_kills(cgroup: Path, name: str, text: str, kills: int) -> None:
    (cgroup / name).write_text(text)
    assert facts.read_oom_kills() == kills


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_who_holds_a_port_is_told(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    (fault,) = facts.probe_port(port)
    assert fault.code == "port.taken"
    assert f"port {port} " in fault.detail
    assert f"(PID {os.getpid()})" in fault.detail


def test_a_free_port_is_no_fault(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    assert facts.probe_port(port) == []
    assert facts.probe_port(0) == []


@pytest.mark.parametrize(("more", "codes"), [([], ["port.taken"]), (["--uds", "/run/v.sock"], [])])
def test_an_engine_on_a_socket_file_needs_no_port(
    listener: socket.socket, tmp_path: Path, more: list[str], codes: list[str]
) -> None:
    port = str(listener.getsockname()[1])
    folders = {f"WARMHOLD_{name}_DIR": str(tmp_path) for name in ("STATE", "RUN", "MODELS")}
    settings, _, _ = read_settings(folders, ["--port", port, *more])
    found = [fault.code for fault in facts.read_facts(settings).faults]
    assert [code for code in found if code.startswith("port.")] == codes


def test_paths_that_the_engine_could_not_use_are_named(tmp_path: Path) -> None:
    for name in ("state", "model"):
        (tmp_path / name).mkdir()
    weights = tmp_path / "model" / "model.safetensors"
    weights.touch(mode=0o000)
    model = Model("m", str(tmp_path / "model"), 0)
    (fault,) = facts.probe_access(os.getuid(), tmp_path / "state" / "cache" / "b1", model)
    assert fault.code == "rights.not-readable"
    assert f"{weights} " in fault.detail and "mode 0000" in fault.detail
    weights.chmod(0o644)
    assert facts.probe_access(os.getuid(), tmp_path / "state" / "cache" / "b1", model) == []


def test_what_was_found_and_what_is_allowed_make_the_cpus() -> None:
    fields = {field.name: None for field in dataclasses.fields(facts.Facts)}
    for quota, affinity, cpus in [(None, 4, 4), (0.5, 4, 1), (2.5, 4, 2), (8.0, 4, 4)]:
        found = facts.Facts(**{**fields, "cpu_quota": quota, "cpu_affinity": affinity})  # type: ignore[arg-type]
        assert found.cpus == cpus


def install(folder: Path, name: str, points: str = "", record: str = "") -> Path:
    place = folder / f"{name}.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text("Name: x")
    if points:
        (place / "entry_points.txt").write_text(points)
        (place / "RECORD").write_text(record)
    return place


def test_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    monkeypatch.setattr(facts.sys, "path", [str(tmp_path / "no.zip"), str(site)])
    install(site, "torch-2.9")
    install(site, "tool-1", "[console_scripts]\ntool = tool:main\n", "tool.py,sha256=1,9")
    plugin = install(
        site,
        "plugin-0.1",
        "[vllm.general_plugins]\nmine = plugin:register\n[vllm.endpoint_plugins]\nend = a:b\n",
        "plugin.py,sha256=1,9",
    )
    (site / "plugin").mkdir()
    plugins, packages = facts.read_packages()
    assert plugins == ("mine",)
    assert [name.partition(":")[0] for name in packages] == ["plugin-0.1", "tool-1", "torch-2.9"]
    assert [":" in name for name in packages] == [True, False, False]
    assert facts.read_packages()[1] == packages
    # The same version, installed anew with other code.
    (plugin / "RECORD").write_text("plugin.py,sha256=2,9")
    _, patched = facts.read_packages()
    assert patched[1:] == packages[1:] and patched[0] != packages[0]
    install(site, "more-3")
    assert "more-3" in facts.read_packages()[1]
