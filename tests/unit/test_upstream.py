# SPDX-License-Identifier: Apache-2.0
"""Upstream's `vllm snapshot`: its scope, its commands, and what there is of its artifacts."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner
from warmhold_entrypoint.errors import Rejection
from warmhold_entrypoint.gpus.gpu_memory import Need
from warmhold_entrypoint.plan import Attempt, Plan
from warmhold_entrypoint.running.orders import CREATE, RESTART, Order
from warmhold_entrypoint.settings import Settings, read_settings
from warmhold_entrypoint.snapshot_mode import upstream
from warmhold_entrypoint.snapshot_mode.snapshots import Snapshots
from warmhold_snapshot import check, cli, gone
from warmhold_snapshot.check import Point
from warmhold_snapshot.upstream import find_folder, list_upstream, sweep_upstream

COMMIT = "0123456789abcdefABCDEF01234567890123abcd"
GOOD = ("--revision", COMMIT)


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All that upstream needs of the machine; the folder of programs."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("vllm", "criu", "nvidia-smi", "ps", "cuda-checkpoint"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    (programs / "cuda_plugin.so").touch()
    command = tmp_path / "vllm" / "entrypoints" / "cli" / "snapshot.py"
    command.parent.mkdir(parents=True)
    command.touch()
    (tmp_path / "machine-id").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(upstream, "_MACHINE_ID", tmp_path / "machine-id")
    monkeypatch.setattr(upstream.platform, "system", lambda: "Linux")
    monkeypatch.setattr(upstream.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(check, "find_missing_rights", lambda: [])
    (tmp_path / "state").mkdir(mode=0o755)
    return programs


def settings(image: Path, *command: str, **more: str) -> Settings:
    environ = {
        "WARMHOLD_MODEL": "own/er",
        "WARMHOLD_STATE_DIR": str(image.with_name("state")),
        "CRIU_CUDA_PLUGIN_DIR": str(image),
        **more,
    }
    return read_settings(environ, command)[0]


def plan(**changes: Any) -> Any:
    environment = {
        "HF_HUB_OFFLINE": "1",
        "WARMHOLD_CONTROL_SOCKET": "/run/c.sock",
        "VLLM_PLUGINS": "other,warmhold",
    }
    made = SimpleNamespace(
        environment=environment,
        backend="vault",
        memory=SimpleNamespace(by_uuid={"u": 1}),
        model_directory=f"/models/hub/models--own--er/snapshots/{COMMIT}",
    )
    return SimpleNamespace(**{**vars(made), **changes})


def offenders(image: Path, *command: str, changes: Any = None, **more: str) -> list[str]:
    found = upstream.find_offenders(settings(image, *command, **more), plan(**(changes or {})))
    assert all(remedy for _, remedy in found)
    return [what for what, _ in found]


def test_nothing_is_outside_the_scope(image: Path) -> None:
    assert (
        offenders(image, *GOOD, "-tp", "1", "--api-server-count", "1", "--max-model-len", "9") == []
    )


@pytest.mark.parametrize(
    ("command", "word"),
    [
        (("-tp", "2"), "--tensor-parallel-size 2"),
        (("-pp=2",), "--pipeline-parallel-size 2"),
        (("--data_parallel_size", "2"), "--data-parallel-size 2"),
        (("-pcp", "2"), "--prefill-context-parallel-size 2"),
        (("-asc", "2"), "--api-server-count 2"),
        (("--grpc",), "--grpc"),
        (("--headless",), "--headless"),
        (("--uds", "/s"), "--uds"),
        (("--middleware", "m"), "--middleware"),
        (("--ssl-keyfile", "k"), "--ssl-keyfile"),
        (("--ssl-certfile", "c"), "--ssl-certfile"),
        (("--ssl-ca-certs", "c"), "--ssl-ca-certs"),
        (("--enable-ssl-refresh",), "--enable-ssl-refresh"),
        (("--ssl-ciphers", "c"), "--ssl-ciphers"),
        (("--api-key", "k"), "an API key"),
        (("-sc", "{}"), "--speculative-config"),
        (("--speculative-config.method", "ngram"), "--speculative-config"),
        (("--spec-model", "m"), "--spec-model"),
        (("--logprobs-mode", "raw_logits"), "--logprobs-mode raw_logits"),
        (("--model", "/"), "model / is a local one"),
        (("--model", "demo"), "model demo is a local one"),
        (("--revision", "main"), "no --revision of 40 hexadecimal digits"),
        (("--revision", COMMIT[:-1] + "g"), "no --revision of 40 hexadecimal digits"),
    ],
)
def test_arguments_outside_the_scope(image: Path, command: tuple[str, ...], word: str) -> None:
    assert offenders(image, *GOOD, *command) == [word]


@pytest.mark.parametrize(
    ("variables", "changes", "word"),
    [
        ({"WARMHOLD_API_KEY": "k"}, {}, "an API key"),
        ({"VLLM_API_KEY": "k"}, {}, "an API key"),
        ({"WARMHOLD_SNAPSHOT": "off"}, {}, "WARMHOLD_SNAPSHOT=off"),
        ({"WARMHOLD_MODE": "disk"}, {}, "WARMHOLD_MODE=disk"),
        ({"WARMHOLD_ENGINE_UID": "7"}, {}, "WARMHOLD_ENGINE_UID=7: upstream's runs as root"),
        ({}, {"memory": SimpleNamespace(by_uuid={})}, "no whole NVIDIA GPU"),
        ({}, {"backend": "vllm"}, "WARMHOLD_WCACHE=vllm: its processes hold the GPU"),
        (
            {"HF_TOKEN": "hf_x"},
            {"environment": {"HF_HUB_OFFLINE": "0"}},
            "the engine has a token of the Hugging Face hub",
        ),
    ],
)
def test_settings_outside_the_scope(
    image: Path, variables: dict[str, str], changes: dict[str, Any], word: str
) -> None:
    assert offenders(image, *GOOD, changes=changes, **variables) == [word]


@pytest.mark.parametrize("name", ["vllm", "criu", "nvidia-smi", "ps"])
def test_a_program_that_is_not_there(image: Path, name: str) -> None:
    (image / name).unlink()
    assert offenders(image, *GOOD) == [f"no {name} on PATH"]


def test_what_else_is_not_there(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (image / "cuda_plugin.so").unlink()
    image.with_name("machine-id").unlink()
    image.with_name("state").chmod(0o777)
    (image.with_name("vllm") / "entrypoints" / "cli" / "snapshot.py").unlink()
    missing = [Point("CAP_SYS_ADMIN", False, "", "add it")]
    monkeypatch.setattr(check, "find_missing_rights", lambda: missing)
    monkeypatch.setattr(upstream.platform, "machine", lambda: "aarch64")
    found = offenders(image, *GOOD)
    assert [word.split()[0] + " " + word.split()[-1] for word in found] == [
        "Linux aarch64",
        "this has)",
        f"no {image}/cuda_plugin.so",
        f"no {image.with_name('machine-id')}",
        "CAP_SYS_ADMIN CAP_SYS_ADMIN",
        f"{image.with_name('state')}: it",
    ]


def test_the_commands(image: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("max-model-len: 64\n")
    command = [*GOOD, "--host", "::", "--port", "81", "--config", str(config), "--hf-token", "hf_x"]
    made = settings(image, *command, WARMHOLD_DRAIN_S="7")
    words = ("own/er", "--max-model-len", "64", "--revision", COMMIT, "--shutdown-timeout", "7")
    words += ("--disable-access-log-for-endpoints", "/health,/metrics", "--enable-sleep-mode")
    artifact = Path("/s/one")
    created = upstream.build_create_argv(made, artifact)
    assert created == ("vllm", "snapshot", "create", *words, "--snapshot-dir", "/s/one")
    restored = upstream.build_restore_argv(made, artifact)
    assert restored == ("vllm", "snapshot", "restore", "/s/one", "--host", "::", "--port", "81")


def test_the_environment_has_no_part_of_ours(image: Path) -> None:
    made = upstream.build_environment(settings(image, *GOOD, HF_TOKEN="hf_x"), plan())
    assert made["VLLM_PLUGINS"] == "other" and "WARMHOLD_CONTROL_SOCKET" not in made
    assert made["HF_HUB_CACHE"] == "/models/hub" and "HF_TOKEN" not in made
    assert made["CRIU_CUDA_PLUGIN_DIR"] == str(image) and made["UV_USE_IO_URING"] == "0"


def publish(image: Path, name: str, created: str, **changes: Any) -> Path:
    folder = find_folder(image.with_name("state") / "snapshots") / name
    folder.mkdir(parents=True)
    manifest = {
        "created_at": created,
        "artifact_bytes": 3 << 20,
        "process_tree": [1001, 1002],
        "engine_argv": upstream.build_engine_words(settings(image, *GOOD)),
        "gpu_uuid": "more than is read here",
    }
    (folder / "manifest.json").write_text(json.dumps({**manifest, **changes}))
    return folder


def choose(image: Path, act: str, name: str, *command: str) -> tuple[str, str]:
    """The name that is meant, or the code of what is against it."""
    order = cast(Order, SimpleNamespace(act=act, name=name))
    chosen, against = upstream.choose(settings(image, *GOOD, *command), plan(), order)
    return chosen, against.code if against else ""


def test_which_one_is_meant(image: Path) -> None:
    assert choose(image, RESTART, "vllm:") == ("", "snapshot.absent")
    publish(image, "a", "2026-01-01")
    publish(image, "b", "2026-01-02")
    publish(image, "c", "2026-01-03", process_tree=[])
    find_folder(image.with_name("state") / "snapshots").joinpath("half-made").mkdir()
    assert choose(image, RESTART, "vllm:") == ("vllm:b", "")
    assert choose(image, RESTART, "vllm:a") == ("vllm:a", "")
    assert choose(image, RESTART, "vllm:c") == ("", "snapshot.damaged")
    assert choose(image, RESTART, "vllm:d") == ("", "snapshot.absent")
    assert choose(image, RESTART, "vllm:../x") == ("", "snapshot.name")
    assert choose(image, CREATE, "vllm:a") == ("", "snapshot.upstream-scope")
    assert choose(image, CREATE, "vllm:half-made") == ("vllm:half-made", "")
    assert choose(image, CREATE, "vllm:a/b") == ("", "snapshot.name")
    assert choose(image, CREATE, "vllm:")[0].startswith("vllm:snapshot-2")


def test_an_engine_with_other_arguments_is_not_brought_back(image: Path) -> None:
    publish(image, "a", "2026-01-01")
    assert choose(image, RESTART, "vllm:a", "--port", "81") == ("vllm:a", ""), "told at the restore"
    found = choose(image, RESTART, "vllm:a", "--served-model-name", "x")
    assert found == ("", "snapshot.identity-mismatch")
    assert choose(image, RESTART, "vllm:a", "--api-key", "k") == ("", "snapshot.upstream-scope")


def test_ours_is_not_made_of_an_engine_of_upstreams() -> None:
    found = Snapshots(identity={"kernel": "k"})
    assert upstream.find_against_ours(found, "one") is None
    against = upstream.find_against_ours(found, "vllm:one")
    assert against and against[0] == "snapshot.backend"
    against = upstream.find_against_ours(Snapshots(code="snapshot.off"), "")
    assert against and against[0] == "snapshot.off"


def test_nobody_gives_a_snapshot_a_name_by_which_it_is_removed() -> None:
    found = Snapshots(identity={"kernel": "k"})
    against = upstream.find_against_ours(found, "", "auto-mine")
    assert against and against[0] == "snapshot.name"
    assert upstream.find_against_ours(found, "", "mine-auto-") is None


def test_upstreams_is_tried_first_and_the_usual_ones_follow(image: Path) -> None:
    usual = Plan(
        environment={},
        loader={},
        model_directory=None,
        uid=None,
        kv_cache_bytes=None,
        attempts=(Attempt("disk", ("vllm",)),),
        rejections=(Rejection("snapshot", "snapshot.absent", "", ""),),
        faults=(),
        model="own/er",
        cache_dir="",
        threads=1,
        snapshots=Snapshots(),
        memory=Need({}),
    )
    made = upstream.put_first(settings(image, *GOOD), usual, "vllm:one")
    assert [(item.mode, item.snapshot) for item in made.attempts] == [
        ("snapshot", "vllm:one"),
        ("disk", ""),
    ]
    assert made.attempts[0].argv[:3] == ("vllm", "snapshot", "restore") and made.rejections == ()


def test_they_are_listed_inspected_and_pruned(image: Path) -> None:
    def run(*arguments: str) -> str:
        folder = image.with_name("state") / "snapshots"
        result = CliRunner().invoke(cli.cli, ["--folder", str(folder), *arguments])
        assert result.exception is None, result.exception
        return result.output

    publish(image, "a", "2026-01-01T10:00:00+00:00")
    publish(image, "b", "2026-01-02T10:00:00+00:00")
    publish(image, "c", "2026-01-03T10:00:00+00:00", engine_argv=None)
    lines = run("list").splitlines()[1:]
    assert [line.split()[:2] for line in lines] == [
        ["vllm:b", "usable"],
        ["vllm:a", "usable"],
        ["vllm:c", "damaged"],
    ]
    assert "2026-01-02T10:00:00Z  3 " in lines[0]
    assert '"gpu_uuid": "more than is read here"' in run("inspect", "vllm:a")
    assert run("prune", "--keep", "1").splitlines() == ["removed vllm:a", "removed vllm:c"]
    assert [row["name"] for row in json.loads(run("list", "--json"))] == ["vllm:b"]


def test_what_is_half_made_is_swept(image: Path) -> None:
    folder = publish(image, "a", "2026-01-01").parent
    (folder / "b" / "images").mkdir(parents=True)
    (folder / ".tmp-criu-x").mkdir()
    assert list_upstream(folder)[0].name == "vllm:a" and len(list_upstream(folder)) == 1
    assert sorted(sweep_upstream(folder)) == [".tmp-criu-x", "vllm:b"]
    assert [path.name for path in folder.iterdir()] == ["a"]


@pytest.mark.parametrize(("words", "status"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137)])
def test_a_criu_that_dumps_nothing_is_criu(
    tmp_path: Path, words: str, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "real"
    program.write_text(f'#!/bin/sh\necho "$@"; {words}\n')
    program.chmod(0o755)
    assert gone.run(str(program), ["restore", "--tree", "x y"]) == status
    assert capfd.readouterr().out == "restore --tree x y\n"


def test_the_program_is_where_one_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = [tmp_path / "noexec", tmp_path / "exec"]
    for folder in allowed:
        folder.mkdir()
    access = gone.os.access
    monkeypatch.setattr(
        gone.os, "access", lambda path, mode: "noexec" not in str(path) and access(path, mode)
    )
    made = gone.write_program(allowed, ".tmp-", "/real/criu")
    assert made.parent == allowed[1] and list(allowed[0].iterdir()) == []
    text = (made / "criu").read_text()
    assert sys.executable in text and "/real/criu" in text
