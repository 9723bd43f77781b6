# SPDX-License-Identifier: Apache-2.0
"""Which artifact fits, and what is against each of the others."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stack import write_model
from warmhold_entrypoint.settings import Settings, read_settings
from warmhold_entrypoint.snapshot_mode import snapshots
from warmhold_entrypoint.snapshot_mode.revoked import collect_secrets, collect_served
from warmhold_entrypoint.snapshot_mode.snapshots import GENERATIONS, Candidate, Snapshots, judge
from warmhold_entrypoint.weight_cache.resident import Vault
from warmhold_snapshot import check
from warmhold_snapshot.artifact import Store
from warmhold_snapshot.check import Point
from warmhold_snapshot.errors import SnapshotError
from warmhold_snapshot.flat import Weights
from warmhold_snapshot.manifest import FORMAT, Manifest
from warmhold_snapshot.mark import write_mark
from warmhold_snapshot.pids import Process

NOW = {
    "kernel": "k",
    "secret.api_key.0": "h1",
    "served": "demo",
    "files.lora-modules": "/a:1",
    "weights": json.dumps({"content": "c", "files": "f"}),
}
HERE = {"container": "c1", "weights": "g1"}
ID = "0123456789abcdef"
VAULT = Vault(rows=({"id": "g1"},))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "state" / "snapshots")


def publish(
    store: Store, name: str = "one", created: str = "1", generation: str = "g1", **changes: str
) -> None:
    publish_as(store, {**NOW, **changes}, name, created, generation)


def publish_as(
    store: Store,
    identity: Mapping[str, str],
    name: str = "one",
    created: str = "1",
    generation: str = "g1",
) -> None:
    with store.draft(name) as draft:
        manifest = Manifest(
            format=FORMAT,
            name=name,
            created=created,
            identity=dict(identity),
            processes=(Process(3001, 1, 3001, 3001, "vllm", 5, (3001,)),),
            stdio=(),
            listeners=(),
            open_files=(),
            counts={},
            shm=(),
            files=(),
            bytes_by_kind={},
            bytes_by_process={},
            timings={},
            notes={GENERATIONS: generation},
            weights={generation: 4096} if generation == ID else {},
        )
        store.publish(draft, manifest)


def look(
    store: Store, vault: Vault = VAULT, wanted: str = "", flat: bool = False, **now: str
) -> Snapshots:
    return judge(store, {**NOW, **now}, HERE, vault, wanted, flat)


def test_there_is_none(store: Store) -> None:
    found = look(store)
    assert (found.code, found.name, found.identity) == ("snapshot.absent", "", NOW)
    assert look(store, wanted="two").detail == "no snapshot two"


def test_the_newest_that_fits(store: Store) -> None:
    publish(store, "a", "1")
    publish(store, "b", "2")
    publish(store, "c", "3", kernel="other")
    found = look(store)
    assert (found.code, found.name) == ("", "b")
    assert look(store, wanted="a").name == "a"
    assert look(store, wanted="c").code == "snapshot.identity-mismatch"


def test_every_field_that_differs_is_named(store: Store) -> None:
    publish(store, kernel="old", cpu="x")
    found = look(store)
    assert found.code == "snapshot.identity-mismatch" and found.revoked == ()
    assert "kernel: old then, k now" in found.detail and "cpu: x then, absent now" in found.detail


@pytest.mark.parametrize(
    "now",
    [
        {"secret.api_key.0": "h2"},
        {"secret.api_key.1": "h"},
        {"secret.ssl-keyfile": "h"},
        {"served": "other"},
        {"files.lora-modules": "/a:2"},
        {"files.default-mm-loras.audio": "/b:1"},
    ],
)
def test_an_artifact_with_another_secret_lora_or_name_is_revoked(
    store: Store, now: dict[str, str]
) -> None:
    publish(store, "a")
    publish(store, "b", **now)
    found = look(store, **now)
    assert (found.name, found.revoked) == ("b", ("a",))


def test_a_digest_that_was_not_known_then_is_no_difference(store: Store) -> None:
    publish(store, weights=json.dumps({"content": "", "files": "f"}))
    assert look(store).name == "one"
    assert look(store, weights=json.dumps({"content": "c", "files": "g"})).name == ""


def test_one_that_failed_here_is_not_tried_again(store: Store) -> None:
    publish(store)
    write_mark(store.path("one"), SnapshotError("snapshot.canary", "why"), HERE)
    found = look(store)
    assert (found.code, found.name) == ("snapshot.marked-failed", "")
    assert "snapshot.canary: why" in found.detail
    assert look(store, wanted="one").name == "one"
    write_mark(store.path("one"), SnapshotError("snapshot.canary", "why"), {**HERE, "weights": ""})
    assert look(store).name == "one"


@pytest.mark.parametrize(
    ("vault", "name"),
    [
        (Vault(rows=({"id": "g1"}, {"id": "g2"})), "one"),
        (Vault("loading", "young"), "one"),
        (Vault(rows=({"id": "g2"},)), ""),
        (Vault("absent", "no socket"), ""),
    ],
)
def test_the_weights_have_to_be_there(store: Store, vault: Vault, name: str) -> None:
    publish(store)
    found = look(store, vault)
    assert found.name == name
    assert found.code == ("" if name else "snapshot.weights-absent")


def test_a_flat_file_stands_in_for_the_vault(store: Store) -> None:
    publish(store, generation=ID)
    found = look(store, flat=True)
    assert found.code == "snapshot.weights-absent" and "in no flat file" in found.detail
    fd = os.memfd_create("weights")
    os.truncate(fd, 4096)
    store.flat.write(Weights(ID, b"{}", ((fd, 4096),)))
    os.close(fd)
    for code in ("", "absent", "dead-socket", "hung"):
        assert look(store, Vault(code), flat=True).name == "one", "PID 1 plans before there is one"
    found = look(store)
    assert found.code == "snapshot.weights-absent"
    assert "WARMHOLD_SNAPSHOT_WEIGHTS=none" in found.detail
    found = look(store, Vault("other-uid", "uid 7"), flat=True)
    assert found.code == "snapshot.weights-absent" and "uid 7" in found.detail
    assert look(store, Vault("loading", "young"), flat=True).name == "one"
    os.truncate(store.flat.folder / ID, 4096)
    assert look(store, flat=True).code == "snapshot.weights-damaged"


def test_an_engines_word_leads_nowhere_else(store: Store) -> None:
    publish(store, generation="../.key")
    found = look(store, flat=True)
    assert found.code == "snapshot.weights-absent" and "is no id" in found.detail


def test_a_damaged_one_is_passed_over(store: Store) -> None:
    publish(store, "a", "1")
    publish(store, "b", "2")
    (store.path("b") / "manifest.json").write_text("{}")
    assert look(store).name == "a"
    store.remove("a")
    assert look(store).code == "snapshot.damaged"


def settings(tmp_path: Path, *command: str, **variables: str) -> Settings:
    variables = {"STATE_DIR": str(tmp_path / "state"), **variables}
    environ = {f"WARMHOLD_{name}": value for name, value in variables.items()}
    made, faults, _ = read_settings(environ, command)
    assert faults == []
    return made


def candidate(wanted: Settings, **changes: Any) -> Candidate:
    argv = ["vllm", "serve", "/model", *wanted.arguments.argv]
    key = {"content": "c", "files": "f"}
    made = Candidate(argv, {**wanted.environ}, {"v": "1"}, ("vllm-0.32.0",), key, "/model")
    return replace(made, **changes)


def read(wanted: Settings, **environment: str) -> Snapshots:
    return snapshots.read_snapshots(wanted, candidate(wanted, environment=environment), VAULT)


@pytest.fixture
def rights(monkeypatch: pytest.MonkeyPatch) -> list[Point]:
    missing: list[Point] = []
    monkeypatch.setattr(check, "find_missing_rights", lambda other_uid: missing)
    monkeypatch.setattr(snapshots.criu, "read_version", lambda: "4.2.1")
    return missing


def test_what_makes_snapshots_impossible(tmp_path: Path, rights: list[Point]) -> None:
    assert read(settings(tmp_path, SNAPSHOT="off")).code == "snapshot.off"
    assert read(settings(tmp_path)).code == "snapshot.absent"
    assert read(settings(tmp_path)).identity == {}
    rights.append(Point("CAP_SYS_ADMIN", False, "for it", "cap_add: [SYS_ADMIN]"))
    found = read(settings(tmp_path))
    assert (found.code, found.detail) == ("snapshot.rights", "CAP_SYS_ADMIN")
    assert found.remedy == "cap_add: [SYS_ADMIN]"


@pytest.fixture
def no_criu(rights: list[Point], monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> str:
        raise SnapshotError("snapshot.criu-absent", "no criu", "use the image")

    monkeypatch.setattr(snapshots.criu, "read_version", absent)


def test_no_criu(tmp_path: Path, store: Store, no_criu: None) -> None:
    assert read(settings(tmp_path)).code == "snapshot.criu-absent"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["--load-format", "runai_streamer"], "--load-format runai_streamer"),
        (["--model-loader-extra-config.a", "1"], "--load-format auto"),
        (["--model_loader_extra_config.a=1"], "--load-format auto"),
        (["--api-server-count", "2"], "2 API servers"),
        (["-asc", "3"], "3 API servers"),
        (["-dp", "2"], "2 API servers"),
        (["--nnodes=2"], "--nnodes"),
        (["--headless"], "--headless"),
        (["-dp", "4", "-dpl", "2", "-asc", "1"], "--data-parallel-size-local"),
        (["--data-parallel-hybrid-lb"], "--data-parallel-hybrid-lb"),
        (["-dpr", "2"], "--data-parallel-start-rank"),
        (["--distributed-executor-backend", "ray"], "--distributed-executor-backend ray"),
    ],
)
def test_what_can_never_be_snapshotted(
    tmp_path: Path, rights: list[Point], command: list[str], words: str
) -> None:
    found = read(settings(tmp_path, *command))
    assert (found.code, found.identity) == ("snapshot.unsupported", {})
    assert words in found.detail and found.remedy


@pytest.mark.parametrize(
    "command",
    [
        *([], ["-tp", "2"], ["-dp", "2", "-asc", "1"], ["--load-format", "safetensors"]),
        *(["--nnodes", "1"], ["--distributed-executor-backend", "mp"], ["-dpl", "1"]),
    ],
)
def test_what_can_be_snapshotted(tmp_path: Path, rights: list[Point], command: list[str]) -> None:
    assert read(settings(tmp_path, *command)).code == "snapshot.absent"


@pytest.mark.parametrize(
    ("command", "environment", "holder"),
    [
        ([], {"HF_TOKEN": "hf_1", "HF_HUB_OFFLINE": "true"}, ""),
        ([], {"HF_TOKEN": "hf_1", "HF_HUB_OFFLINE": "0"}, "HF_TOKEN"),
        ([], {"HUGGING_FACE_HUB_TOKEN": "hf_1"}, "HUGGING_FACE_HUB_TOKEN"),
        (["--hf-token", "hf_1"], {}, "--hf-token"),
        (["--config", "CONFIG"], {"HF_HUB_OFFLINE": "1"}, "--hf-token"),
    ],
)
def test_an_engine_that_has_the_hubs_token(
    tmp_path: Path,
    rights: list[Point],
    command: list[str],
    environment: dict[str, str],
    holder: str,
) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text("hf-token: hf_1\n")
    wanted = settings(tmp_path, *(str(config) if word == "CONFIG" else word for word in command))
    found = read(wanted, **environment)
    assert found.code == ("snapshot.unsupported" if holder else "snapshot.absent")
    assert found.detail.startswith(holder) and "hf_1" not in found.detail
    later = snapshots.find_obstacle(wanted, candidate(wanted, model_directory=None))
    assert later is None, "a download comes first, and another plan"


def test_the_identity(tmp_path: Path, rights: list[Point], store: Store) -> None:
    wanted = settings(tmp_path, "--api-key", "sk-1", "sk-2")
    found = read(wanted, PATH="/bin", HOSTNAME="a", SUPERVISOR_ENABLED="1", AWS_KEY="secret")
    fields = set(found.identity)
    assert {"environment.PATH", "environment.AWS_KEY", "secret.api_key.1"} <= fields
    assert not {"environment.HOSTNAME", "environment.SUPERVISOR_ENABLED"} & fields
    shown = json.dumps(dict(found.identity))
    assert "sk-1" not in shown and "secret" not in json.dumps(found.identity["environment.AWS_KEY"])
    again = read(wanted, PATH="/bin", HOSTNAME="b", AWS_KEY="secret")
    assert again.identity == found.identity
    assert read(wanted, PATH="/usr/bin", AWS_KEY="secret").identity != found.identity


def fields_that_differ(one: Snapshots, other: Snapshots) -> set[str]:
    assert one.identity and other.identity
    fields = {**one.identity, **other.identity}
    return {name for name in fields if one.identity.get(name) != other.identity.get(name)}


def test_what_files_contain_is_part_of_it(
    tmp_path: Path, rights: list[Point], store: Store
) -> None:
    model, template = write_model(tmp_path / "model"), tmp_path / "template.jinja"
    template.write_text("one")
    wanted = settings(tmp_path, "--chat-template", str(template))

    def look_again() -> Snapshots:
        made = candidate(wanted, model_directory=str(model))
        return snapshots.read_snapshots(wanted, made, VAULT)

    before = look_again()
    assert fields_that_differ(before, look_again()) == set()
    template.write_text("two")
    (model / "generation_config.json").write_text("{}")
    after = look_again()
    assert fields_that_differ(before, after) == {"files.model", "files.chat-template"}
    lines = [item.line() for item in snapshots.find_differences(before.identity, after.identity)]
    assert any(line.startswith("files.model: +generation_config.json:") for line in lines)


def test_what_is_installed_and_served_is_part_of_it(
    tmp_path: Path, rights: list[Point], store: Store
) -> None:
    wanted = settings(tmp_path)
    found = read(wanted)
    made = candidate(wanted, environment={}, packages=("vllm-0.32.0", "plugin-0.1"))
    other = snapshots.read_snapshots(wanted, made, VAULT)
    assert fields_that_differ(found, other) == {"packages"}
    (item,) = snapshots.find_differences(found.identity, other.identity)
    assert item.line() == "packages: +plugin-0.1"
    renamed = read(settings(tmp_path, MODEL="org/model"))
    assert fields_that_differ(found, renamed) == {"served"}


def test_no_secret_argument_is_in_it(tmp_path: Path, rights: list[Point], store: Store) -> None:
    wanted = settings(tmp_path)
    argv = ("vllm", "serve", "/m", "--hf-token=hf_1", "--api-key", "sk-1", "sk-2", "--seed", "1")
    made = candidate(wanted, argv=argv, model_directory=None)
    found = snapshots.read_snapshots(wanted, made, VAULT)
    shown = json.loads(found.identity["argv"])
    assert shown[3:] == ["--hf-token=***", "--api-key", "***", "***", "--seed", "1"]


@pytest.mark.parametrize("package", ["warmhold_entrypoint", "warmhold_snapshot", "warmhold_wcache"])
def test_code_of_every_package_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for module in (snapshots, snapshots.warmhold_snapshot, snapshots.warmhold_wcache):
        path = Path(module.__file__ or "")
        (folder,) = (item for item in path.parents if item.name.startswith("warmhold_"))
        shutil.copytree(folder, tmp_path / folder.name)
        copied = tmp_path / path.relative_to(folder.parent)
        monkeypatch.setattr(module, "__file__", str(copied))
    before = snapshots.digest_code()
    assert snapshots.digest_code() == before
    path = next(iter(sorted((tmp_path / package).rglob("*.py"))))
    path.write_text(path.read_text() + "# changed\n")
    assert snapshots.digest_code() != before


# Revoked


@pytest.fixture
def deed(tmp_path: Path, rights: list[Point], store: Store) -> Callable[..., Snapshots]:
    """Publish an artifact of the given settings as `one`; return what other settings then find."""

    def publish_and_look(then: Settings, now: Settings) -> Snapshots:
        publish_as(store, read(then).identity)
        assert read(then).revoked == ()
        return read(now)

    return publish_and_look


def test_a_lora_or_another_name_revokes(
    tmp_path: Path, deed: Callable[..., Snapshots], store: Store
) -> None:
    plain = settings(tmp_path)
    assert collect_served(plain) == ["demo"]
    for other in (
        settings(tmp_path, "--lora-modules", "a=/lora"),
        settings(tmp_path, "--served-model-name", "demo", "second"),
    ):
        assert deed(plain, other).revoked == ("one",)
        assert deed(other, plain).revoked == ("one",)
    assert deed(plain, settings(tmp_path, "--seed", "1")).revoked == ()


@pytest.mark.parametrize("obstacle", ["off", "rights", "unsupported", "criu"])
def test_what_is_revoked_is_told_whatever_stands_in_the_way(
    tmp_path: Path,
    deed: Callable[..., Snapshots],
    rights: list[Point],
    obstacle: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = settings(tmp_path, API_KEY="sk-1")
    assert deed(old, old).revoked == ()
    variables = {"SNAPSHOT": "off"} if obstacle == "off" else {}
    command = ["--headless"] if obstacle == "unsupported" else []
    if obstacle == "rights":
        rights.append(Point("CAP_SYS_ADMIN", False, "for it", "cap_add: [SYS_ADMIN]"))
    if obstacle == "criu":

        def absent() -> str:
            raise SnapshotError("snapshot.criu-absent", "no criu", "use the image")

        monkeypatch.setattr(snapshots.criu, "read_version", absent)
    code = f"snapshot.{obstacle}{'-absent' if obstacle == 'criu' else ''}"
    same = read(settings(tmp_path, *command, API_KEY="sk-1", **variables))
    assert (same.code, same.revoked) == (code, ())
    for changed in ({"API_KEY": "sk-2"}, {}):
        found = read(settings(tmp_path, *command, **variables, **changed))
        assert (found.code, found.name, found.revoked) == (code, "", ("one",))


def cut(folder: Path) -> None:
    (folder / "one" / "manifest.json").write_text("{")


def lose(folder: Path) -> None:
    (folder / "one" / "manifest.json").unlink()


def flip(folder: Path) -> None:
    path = folder / "one" / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b"3001", b"3002"))


def replace_key(folder: Path) -> None:
    (folder / ".key").unlink()


def open_key(folder: Path) -> None:
    (folder / ".key").chmod(0o644)


@pytest.mark.parametrize("damage", [cut, lose, flip, replace_key, open_key])
@pytest.mark.parametrize("mode", ["manual", "off"])
def test_what_cannot_be_read_is_revoked_where_there_are_secrets(
    tmp_path: Path,
    deed: Callable[..., Snapshots],
    store: Store,
    damage: Callable[[Path], None],
    mode: str,
) -> None:
    old = settings(tmp_path, API_KEY="sk-1")
    deed(old, old)
    damage(store.folder)
    assert read(settings(tmp_path, API_KEY="sk-2", SNAPSHOT=mode)).revoked == ("one",)
    without = read(settings(tmp_path, SNAPSHOT=mode)).revoked
    assert without == (() if damage in (cut, lose) else ("one",)), "its manifest names a secret"


@pytest.mark.parametrize("damage", [cut, lose, flip, replace_key, open_key])
def test_what_cannot_be_read_stays_where_there_never_were_secrets(
    tmp_path: Path,
    deed: Callable[..., Snapshots],
    store: Store,
    damage: Callable[[Path], None],
) -> None:
    deed(settings(tmp_path), settings(tmp_path))
    damage(store.folder)
    found = read(settings(tmp_path))
    assert found.code == ("snapshot.key" if damage is open_key else "snapshot.damaged")
    assert found.revoked == ()


def test_a_certificate_is_known_by_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "cert.pem"
    path.write_text("one")
    wanted = settings(tmp_path, "--ssl-certfile", str(path))
    before = collect_secrets(wanted)
    path.write_text("two")
    assert collect_secrets(wanted).keys() == before.keys() == {"ssl-certfile"}
    assert collect_secrets(wanted) != before


def test_circumstances_change_with_the_weights() -> None:
    before: dict[str, Any] = snapshots.read_circumstances(VAULT)
    assert snapshots.read_circumstances(VAULT) == before
    other = snapshots.read_circumstances(replace(VAULT, rows=()))
    assert {name for name in before if before[name] != other[name]} == {"weights"}
