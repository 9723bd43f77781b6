# SPDX-License-Identifier: Apache-2.0
"""supervisord's configuration: as supervisord reads it, and with nothing of the user in it."""

import configparser
import os
from pathlib import Path
from typing import Any

import pytest
from supervisor.options import ServerOptions
from warmhold_entrypoint.container.conf import build_conf, check_paths, write_conf
from warmhold_entrypoint.settings import Settings, read_settings
from warmhold_entrypoint.weight_cache.backend import choose_backend
from warmhold_wcache import serve

NASTY = 'x%(here)s ; rm -rf # "it\'s" $HOME\n[program:evil]'


def settings(*command: str, **variables: str) -> Settings:
    made, faults, _ = read_settings(
        {f"WARMHOLD_{name}": value for name, value in variables.items()}, command
    )
    assert faults == []
    return made


def conf(made: Settings) -> str:
    return build_conf(made, choose_backend(made, False))


def programs(made: Settings) -> dict[str, Any]:
    """Given settings with a real run directory, return the programs as supervisord has them."""
    return {program.name: program for group in groups(made) for program in group.process_configs}


def groups(made: Settings) -> list[Any]:
    options = ServerOptions()
    options.realize(["-c", str(write_conf(made, choose_backend(made, False)))])
    assert options.parse_warnings == []
    return options.process_group_configs


def test_no_user_data_is_in_the_text() -> None:
    with_all = settings(
        *("--hf-overrides", NASTY, "--api-key", "x%(here)s;#'"),
        MODEL=NASTY,
        ENGINE_ARGS="--x '100% ; # \"'",
        STATE_DIR=f"/{NASTY}",
        MODELS_DIR=f"/{NASTY}",
    )
    assert conf(with_all) == conf(settings())


def test_supervisord_reads_it_as_meant(tmp_path: Path) -> None:
    found = programs(
        settings(RUN_DIR=str(tmp_path), DRAIN_S="45", METRICS_PORT="9100", WCACHE="vault")
    )
    assert set(found) == {"engine", "end", "metrics", "wcache"}
    assert found["engine"].command.endswith(" -m warmhold_entrypoint.running.engine")
    assert found["end"].command.endswith(" -m warmhold_entrypoint.container.listener")
    assert found["metrics"].command.endswith(" metrics --port 9100")
    assert found["engine"].stopwaitsecs == 45 + 30
    assert found["engine"].startsecs == 0


@pytest.mark.parametrize("uid", [None, "1000"])
def test_the_vault_starts_before_the_engine_and_ends_after_it(
    tmp_path: Path, uid: str | None
) -> None:
    variables = {"METRICS_PORT": "9100", "WCACHE": "vault"}
    if uid is not None:
        variables["ENGINE_UID"] = uid
    found = programs(settings(RUN_DIR=str(tmp_path), **variables))
    vault = found["wcache"]
    words = vault.command.split()
    at = words.index("--listen")
    expected_uid = str(os.getuid()) if uid is None else uid
    assert words[at + 1 : at + 4] == [f"{tmp_path}/wcache.sock", expected_uid, "none"]
    assert words[-8:-4] == ["--listen-fd", "3", "--store", f"{tmp_path}/fdstore.sock"]
    assert vault.autorestart.__name__ == "RestartUnconditionally"
    # supervisord starts by priority and stops in reverse, one after the other.
    assert vault.priority < found["engine"].priority < found["metrics"].priority
    serve.build_parser().parse_args(words[words.index("warmhold_wcache.serve") + 1 :])


def test_the_listener_hears_of_ends_and_not_of_stops(tmp_path: Path) -> None:
    (listener,) = (
        group for group in groups(settings(RUN_DIR=str(tmp_path))) if group.name == "end"
    )
    events = {event.__name__ for event in listener.pool_events}
    assert events == {"ProcessStateExitedEvent", "ProcessStateFatalEvent"}


def test_metrics_only_where_asked_for_and_the_vault_unless_unwanted(tmp_path: Path) -> None:
    assert set(programs(settings(RUN_DIR=str(tmp_path)))) == {"engine", "end", "wcache"}
    assert set(programs(settings(RUN_DIR=str(tmp_path), WCACHE="off"))) == {"engine", "end"}


def test_the_vaults_health_has_a_program_where_there_is_a_vault() -> None:
    asked = {"WCACHE_HEALTH_PORT": "9200"}
    assert "[program:wcache-health]" in conf(settings(**asked))
    assert "wcache-health" not in conf(settings(**asked, WCACHE="off"))
    assert "wcache-health" not in conf(settings())


def test_upstreams_holder_is_a_program_that_the_runner_alone_starts(tmp_path: Path) -> None:
    found = programs(settings(RUN_DIR=str(tmp_path), WCACHE="vllm"))
    assert set(found) == {"engine", "end", "preload"}
    holder = found["preload"]
    assert not holder.autostart and not holder.autorestart
    assert holder.stopasgroup and holder.killasgroup
    assert holder.command.endswith(" -m warmhold_entrypoint.weight_cache.holder_program")
    assert holder.priority < found["engine"].priority


def test_every_exit_code_of_the_runner_is_expected(tmp_path: Path) -> None:
    engine = programs(settings(RUN_DIR=str(tmp_path)))["engine"]
    assert sorted(engine.exitcodes) == list(range(256))
    assert engine.autorestart.__name__ == "RestartWhenExitUnexpected"


def test_no_log_is_rotated_or_kept() -> None:
    parser = configparser.RawConfigParser()
    parser.read_string(conf(settings(METRICS_PORT="9100", WCACHE="vault")))
    logs = [
        (section, key)
        for section in parser.sections()
        for key, value in parser.items(section)
        if key.endswith("logfile") and value != "NONE"
    ]
    assert len(logs) == 8
    for section, key in logs:
        assert parser.get(section, f"{key}_maxbytes") == "0"
        assert parser.get(section, f"{key}_backups") == "0"


def test_the_control_socket_is_roots() -> None:
    parser = configparser.RawConfigParser()
    parser.read_string(conf(settings()))
    assert parser.get("unix_http_server", "chmod") == "0700"
    assert not parser.has_section("inet_http_server")


@pytest.mark.parametrize(
    ("path", "sound"),
    [
        ("/run/warmhold", True),
        ("/tmp/a-b_c.d/e", True),
        ("run", False),
        ("/run/a b", False),
        ("/run/%(x)s", False),
        ("/run/a;b", False),
        ("/run/a#b", False),
        ("/run\n[x]", False),
    ],
)
def test_a_run_directory_that_the_file_cannot_hold_is_a_fault(path: str, sound: bool) -> None:
    codes = [fault.code for fault in check_paths(settings(RUN_DIR=path))]
    assert codes == ([] if sound else ["settings.run-dir"])
