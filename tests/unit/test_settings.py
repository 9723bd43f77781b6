# SPDX-License-Identifier: Apache-2.0
"""Settings: every fault at once, secrets never shown, nothing of the environment misread."""

import logging
from pathlib import Path

import pytest
from warmhold_entrypoint.errors import Exit, Fault
from warmhold_entrypoint.settings import (
    FIELDS,
    PREFIX,
    SECRETS,
    Environment,
    Settings,
    read_settings,
    settings_table,
)

SECRET = "s3cret"


def read(*command: str, **variables: str) -> Settings:
    settings, faults, _ = read_settings(variables, command)
    assert faults == []
    return settings


def faults_of(*command: str, **variables: str) -> list[Fault]:
    return read_settings(variables, command)[1]


def test_defaults_are_sound() -> None:
    settings, faults, notes = read_settings({"PATH": "/bin", "HOME": "/root"}, ())
    assert (faults, notes) == ([], [])
    assert (settings.env.mode, settings.model, settings.env.drain_s) == ("auto", "demo", 30)
    assert (settings.api_keys, settings.offline, settings.env.metrics_port) == ((), False, None)


def test_every_fault_at_once() -> None:
    found = faults_of(
        *("--port", "0", "--hf-overrides", "{"),
        WARMHOLD_MODE="fast",
        WARMHOLD_DRAIN_S="soon",
        WARMHOLD_METRICS_PORT="70000",
        WARMHOLD_API_KEY_FILE="/nowhere",
    )
    assert sorted(fault.code for fault in found) == [
        *("arguments.json", "arguments.port", "settings.drain-s"),
        *("settings.metrics-port", "settings.mode", "settings.secret-file"),
    ]
    assert {fault.exit_code for fault in found} == {Exit.SETTINGS}
    assert all(fault.remedy for fault in found)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MODE", "Disk"),
        ("DRAIN_S", "-1"),
        ("DRAIN_S", "1.5"),
        ("READY_TIMEOUT_S", "inf"),
        ("READY_TIMEOUT_S", "nan"),
        ("CANARY_INTERVAL_S", "0"),
        ("CANARY_TIMEOUT_S", "0"),
        ("MAX_FAILURES", "0"),
        ("KV_CACHE_GIB", "0"),
        ("ENGINE_UID", "-1"),
        ("ENGINE_UID", "4294967295"),
        ("METRICS_PORT", "0"),
        ("LOG_FORMAT", "xml"),
        ("LOG_LEVEL", "loud"),
    ],
)
def test_a_bad_value_is_shown_and_leaves_the_default(name: str, value: str) -> None:
    settings, (fault,), _ = read_settings({PREFIX + name: value}, ())
    assert fault.code == f"settings.{name.lower().replace('_', '-')}"
    assert f"{PREFIX}{name}={value!r}" in fault.detail
    assert settings.env == Environment()


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_an_empty_value_is_unset(name: str) -> None:
    assert read(**{PREFIX + name.upper(): ""}).env == Environment()


def test_settings_are_frozen() -> None:
    with pytest.raises(AttributeError):
        read().env.drain_s = 1  # type: ignore[misc]


# Secrets


def test_a_secret_from_a_file_without_its_line_end(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{SECRET}\n")
    assert read(WARMHOLD_API_KEY_FILE=str(file)).api_keys == (SECRET,)


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["missing", "not-utf-8"])
def test_a_secret_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    (fault,) = faults_of(WARMHOLD_API_KEY_FILE=str(file))
    assert fault.code == "settings.secret-file"
    assert f"WARMHOLD_API_KEY_FILE names {file}" in fault.detail


@pytest.mark.parametrize("content", ["", "\n"])
def test_an_empty_secret_file_is_a_fault(tmp_path: Path, content: str) -> None:
    """An empty key means no authentication to vLLM: the server would stand open."""
    file = tmp_path / "key"
    file.write_text(content)
    assert [fault.code for fault in faults_of(WARMHOLD_API_KEY_FILE=str(file))] == [
        "settings.secret-file"
    ]


@pytest.mark.parametrize("key", [f"{SECRET}\n", f"{SECRET} x\r\ny", f"{SECRET}é☃"])
def test_a_key_that_no_header_can_carry_is_a_fault(key: str) -> None:
    """Such a key fails every request and every canary."""
    (fault,) = faults_of(WARMHOLD_API_KEY=key)
    assert fault.code == "settings.api-key"
    assert SECRET not in fault.lines()


@pytest.mark.parametrize(
    ("command", "variables"),
    [
        ([], {"WARMHOLD_API_KEY": SECRET}),
        ([], {"VLLM_API_KEY": SECRET}),
        (["--api-key", SECRET], {}),
        ([f"--api_key={SECRET}"], {}),
        ([], {"WARMHOLD_ENGINE_ARGS": f"--api-key {SECRET}"}),
    ],
    ids=["variable", "vllm", "argument", "inline", "engine-args"],
)
def test_secrets_show_nowhere(
    command: list[str], variables: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        settings, faults, notes = read_settings(
            {**variables, "WARMHOLD_MODE": "fast", "WARMHOLD_API_KEYS": SECRET}, command
        )
    assert settings.api_keys == (SECRET,)
    assert faults and notes
    shown = [repr(settings), str(settings), repr(settings.env), str(settings.env), repr(faults)]
    shown += [fault.lines() for fault in faults] + notes + [caplog.text]
    assert [text for text in shown if SECRET in text] == []


@pytest.mark.parametrize(
    ("command", "variables", "keys"),
    [
        (["--api-key", "a", "b"], {"WARMHOLD_API_KEY": "c", "VLLM_API_KEY": "d"}, ("a", "b")),
        (["--api-key"], {"WARMHOLD_API_KEY": "c"}, ("c",)),
        ([], {"WARMHOLD_API_KEY": "c", "VLLM_API_KEY": "d"}, ("c",)),
        ([], {"VLLM_API_KEY": "d"}, ("d",)),
        ([], {"WARMHOLD_API_KEY": "", "VLLM_API_KEY": ""}, ()),
    ],
)
def test_whose_api_key_wins(
    command: list[str], variables: dict[str, str], keys: tuple[str, ...]
) -> None:
    assert read(*command, **variables).api_keys == keys


# What is not a setting


@pytest.mark.parametrize(
    ("name", "meant"),
    [("MODELL", "MODEL"), ("DRAIN", "DRAIN_S"), ("KV_CACHE_GB", "KV_CACHE_GIB"), ("ZZZ", None)],
)
def test_an_unknown_variable_is_noted(name: str, meant: str | None) -> None:
    settings, faults, (note,) = read_settings({PREFIX + name: "/secret/value"}, ())
    assert (settings.env, faults) == (Environment(), [])
    assert note.startswith(f"{PREFIX}{name} ")
    assert "/secret/value" not in note
    assert note.partition("did you mean ")[2] == (f"{PREFIX}{meant}?" if meant else "")


def test_kubernetes_service_variables_are_harmless() -> None:
    service = {
        "WARMHOLD_PORT": "tcp://10.0.0.1:8000",
        "WARMHOLD_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "WARMHOLD_PORT_8000_TCP_ADDR": "10.0.0.1",
        "WARMHOLD_SERVICE_HOST": "10.0.0.1",
        "WARMHOLD_SERVICE_PORT": "8000",
    }
    settings, faults, _ = read_settings(service, ())
    assert faults == []
    assert settings.env == Environment()
    assert settings.arguments.port == 8000


# What follows from settings


@pytest.mark.parametrize(
    ("value", "offline"),
    [("1", True), ("true", True), ("YES", True), ("On", True), ("0", False), ("", False)],
)
def test_offline_as_hugging_face_spells_it(value: str, offline: bool) -> None:
    assert read(HF_HUB_OFFLINE=value).offline is offline
    assert read(TRANSFORMERS_OFFLINE=value).offline is offline
    assert read(HF_HUB_OFFLINE="0", TRANSFORMERS_OFFLINE=value).offline is False


def test_the_model_among_the_arguments_wins() -> None:
    assert read(WARMHOLD_MODEL="a/b").model == "a/b"
    assert read("--model", "c/d", WARMHOLD_MODEL="a/b").model == "c/d"


def test_command_comes_before_the_variable() -> None:
    settings = read("--seed", "1", WARMHOLD_ENGINE_ARGS="--seed 2")
    assert settings.arguments.argv == ("--seed", "1", "--seed", "2")


def test_the_table_has_a_row_for_each_field() -> None:
    rows = settings_table()
    names = [PREFIX + name.upper() for name in FIELDS]
    assert [name.partition(" ")[0] for name, _, _ in rows] == names
    assert all(default and meaning for _, default, meaning in rows)
    with_file = {name.partition(" ")[0] for name, _, _ in rows if "_FILE" in name}
    assert with_file == {PREFIX + name.upper() for name in SECRETS}
