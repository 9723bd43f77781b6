# SPDX-License-Identifier: Apache-2.0
"""What keeps an engine on a GPU from being snapshotted, one reason after the other."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from warmhold_entrypoint.gpus import gpu_snapshots
from warmhold_entrypoint.gpus.gpu import Gpu, Gpus
from warmhold_entrypoint.gpus.gpu_snapshots import find_gpu_obstacle, find_plugins, identify
from warmhold_entrypoint.settings import Settings, read_settings
from warmhold_entrypoint.snapshot_mode import snapshots
from warmhold_entrypoint.snapshot_mode.snapshots import Candidate, read_snapshots
from warmhold_entrypoint.weight_cache.resident import Vault
from warmhold_snapshot import check, cuda
from warmhold_snapshot.artifact import Store
from warmhold_snapshot.errors import SnapshotError
from warmhold_snapshot.identity import is_on_gpu

ONE = Gpu("u1", 141 << 30, "9.0", "NVIDIA H200")
GPUS = Gpus("580.159.04", True, (ONE,))
SLEEP = ["--enable-sleep-mode", "--sleep-mode-backend", "warmhold"]
ARGV = ["vllm", "serve", "/m", *SLEEP]


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with criu's plug-in, and the program on PATH."""
    (tmp_path / cuda.PLUGIN).write_bytes(b"plug-in")
    program = tmp_path / cuda.PROGRAM
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu_snapshots.platform, "machine", lambda: "x86_64")
    return tmp_path


def settings(plugins: Path, *command: str, **more: str) -> Settings:
    environ = {"CRIU_CUDA_PLUGIN_DIR": str(plugins), **more}
    return read_settings(environ, command)[0]


def ask(
    plugins: Path,
    *command: str,
    gpus: Gpus = GPUS,
    argv: list[str] = ARGV,
    environment: dict[str, str] | None = None,
    model: str | None = None,
) -> tuple[str, str]:
    """Code and detail; empty where nothing is in the way."""
    found = find_gpu_obstacle(settings(plugins, *command), gpus, argv, environment or {}, model)
    return found[:2] if found else ("", "")


def test_nothing_is_in_the_way(plugins: Path) -> None:
    assert ask(plugins) == ("", "")
    assert find_plugins(settings(plugins)) == plugins
    assert find_plugins(read_settings({}, ())[0]) == Path("/usr/local/lib/criu")


@pytest.mark.parametrize(
    ("command", "changes", "code", "said"),
    [
        (["-tp", "2"], {}, "snapshot.unsupported", "2 workers"),
        (["--pipeline-parallel-size=3"], {}, "snapshot.unsupported", "3 workers"),
        ([], {"argv": ARGV[:3]}, "snapshot.unsupported", "sleep mode"),
        ([], {"argv": [*ARGV[:-1], "cumem"]}, "snapshot.unsupported", "sleep mode"),
        (
            [],
            {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}},
            "snapshot.unsupported",
            "PYTORCH_CUDA_ALLOC_CONF",
        ),
        ([], {"argv": [*ARGV, "--quantization", "fp8"]}, "snapshot.unsupported", "fp8"),
        ([], {"argv": [*ARGV, "-q", "fp8"]}, "snapshot.unsupported", "fp8"),
        ([], {"gpus": replace(GPUS, all=(ONE, ONE))}, "snapshot.gpu", "2 GPUs"),
        (
            [],
            {"gpus": replace(GPUS, all=(replace(ONE, name="NVIDIA H200 MIG 1g.18gb"),))},
            "snapshot.gpu",
            "MIG",
        ),
        (
            [],
            {"gpus": replace(GPUS, driver="560.35.03", can_checkpoint=False)},
            "snapshot.gpu",
            "driver 560.35.03 cannot",
        ),
    ],
)
def test_a_reason(
    plugins: Path, command: list[str], changes: dict[str, Any], code: str, said: str
) -> None:
    found = ask(plugins, *command, **changes)
    assert found[0] == code and said in found[1]


def test_a_quantised_checkpoint(plugins: Path) -> None:
    config = plugins / "config.json"
    config.write_text('{"quantization_config": {"quant_method": "fp8"}}')
    assert ask(plugins, model=str(plugins))[0] == "snapshot.unsupported"
    for text in ('{"quantization_config": null}', "{}", "[]", "no JSON"):
        config.write_text(text)
        assert ask(plugins, model=str(plugins)) == ("", "")


@pytest.mark.parametrize("missing", [cuda.PLUGIN, cuda.PROGRAM])
def test_what_criu_needs_is_named(plugins: Path, missing: str) -> None:
    (plugins / missing).unlink()
    code, detail = ask(plugins)
    assert code == "snapshot.gpu" and missing in detail


def test_another_machine(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_snapshots.platform, "machine", lambda: "aarch64")
    assert ask(plugins) == ("snapshot.gpu", "not tried on aarch64")


def test_what_has_to_be_equal(plugins: Path) -> None:
    found = identify(GPUS, plugins)
    assert (found["uuid"], found["driver"]) == ("u1", "580.159.04")
    (plugins / cuda.PLUGIN).write_bytes(b"another one")
    assert identify(GPUS, plugins)["plugin"] != found["plugin"]
    (plugins / cuda.PLUGIN).unlink()
    with pytest.raises(SnapshotError) as caught:
        identify(GPUS, plugins)
    assert caught.value.code == "snapshot.gpu"


def test_it_is_part_of_the_identity_on_a_gpu_alone(
    plugins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "find_missing_rights", lambda other_uid: [])
    monkeypatch.setattr(snapshots.criu, "read_version", lambda: "4.2.1")
    given = settings(plugins, WARMHOLD_STATE_DIR=str(tmp_path / "state"))
    Store(tmp_path / "state" / "snapshots")
    key = {"content": "c", "files": "f"}
    cpu = Candidate(ARGV, {}, {"v": "1"}, (), key, str(plugins))
    found = [
        read_snapshots(given, candidate, Vault()).identity
        for candidate in (cpu, replace(cpu, gpus=GPUS))
    ]
    assert [is_on_gpu(identity) for identity in found] == [False, True]
    added = found[1].keys() - found[0].keys()
    assert added == {f"gpu.{name}" for name in identify(GPUS, plugins)}
    two = replace(cpu, gpus=replace(GPUS, all=(ONE, ONE)))
    refused = read_snapshots(given, two, Vault())
    assert (refused.code, refused.identity) == ("snapshot.gpu", {})
