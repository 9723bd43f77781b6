# SPDX-License-Identifier: Apache-2.0
"""Engine arguments: found in every spelling of vLLM's parser, and never changed by a byte."""

import shlex
from pathlib import Path

import pytest
from warmhold_entrypoint.arguments import EngineArguments, parse_arguments
from warmhold_entrypoint.errors import Fault
from warmhold_entrypoint.start import read_command, write_command

AWKWARD = [
    "100%",
    "%(ENV_HOME)s ; rm # x",
    'say "hi"',
    "it's",
    "$HOME ${X:-y} `id`",
    "two\nlines\n",
    '{"a": {"b": "c d"}, "e": "\\u00e9"}',
    "back\\slash",
    "grüße ☃",
    "",
    " ",
    "*",
]


def arguments(*argv: str) -> EngineArguments:
    return EngineArguments(argv)


def faults(*command: str, extra: str = "") -> list[Fault]:
    return parse_arguments(command, extra)[1]


@pytest.mark.parametrize(
    ("argv", "count"),
    [
        ([], 1),
        (["--api-server-count", "4"], 4),
        (["-asc", "0"], 1),
        (["-asc", "x"], 1),
        (["-dp", "2"], 2),
        (["--data_parallel_size=2", "--api_server_count=1"], 1),
        (["-tp", "2"], 1),
    ],
)
def test_api_servers(argv: list[str], count: int) -> None:
    assert arguments(*argv).api_server_count == count


@pytest.mark.parametrize(
    ("argv", "elsewhere"),
    [
        ([], ""),
        (["--nnodes", "1", "-dp", "2", "-dpl", "2"], ""),
        (["-n", "2", "-r", "1"], "--nnodes"),
        (["--headless"], "--headless"),
        (["-dpn", "0"], "--data-parallel-rank"),
        (["-dpe"], "--data-parallel-external-lb"),
        (["-dpm"], "--data-parallel-multi-port-external-lb"),
        (["-dp", "2", "-dpl", "1"], "--data-parallel-size-local"),
        (["-dpb", "ray"], "--data-parallel-backend ray"),
        (["--distributed-executor-backend", "ray"], "--distributed-executor-backend ray"),
    ],
)
def test_what_runs_elsewhere(argv: list[str], elsewhere: str) -> None:
    assert arguments(*argv).elsewhere == elsewhere


@pytest.mark.parametrize(
    ("argv", "values"),
    [
        (["--api-key", "a"], ("a",)),
        (["--api_key", "a"], ("a",)),
        (["--api-key=a"], ("a",)),
        (["--api_key=a=b"], ("a=b",)),
        (["--api-key="], ("",)),
        (["--api-key", "a", "b"], ("a", "b")),
        (["--api-key", "a", "--seed", "1"], ("a",)),
        (["--api-key", "a", "--api-key", "b"], ("b",)),
        (["--api-key", "-5", "-.5x"], ("-5",)),
        (["--api-key", "-"], ("-",)),
        (["--api-key"], ()),
        (["--api-keys", "a"], ()),
        (["--api-k", "a", "b"], ("a", "b")),
        (["--api_ke=a"], ("a",)),
        (["--api", "a"], ()),  # --api-server-count begins so too
        (["x", "--seed", "--api-key"], ()),
        ([], ()),
    ],
)
def test_values_of_the_last_occurrence(argv: list[str], values: tuple[str, ...]) -> None:
    assert arguments(*argv).values("--api-key") == values
    assert arguments(*argv).value("--api-key") == (values[0] if values else None)


@pytest.mark.parametrize(
    ("argv", "there"),
    [
        (["--enforce_eager"], True),
        (["--enforce-eager"], True),
        (["--x", "--enforce-eager=1"], True),
        (["enforce-eager"], False),
        (["--no-enforce-eager"], False),
    ],
)
def test_has(argv: list[str], there: bool) -> None:
    assert arguments(*argv).has("--enforce-eager") is there


@pytest.mark.parametrize(
    ("argv", "rest"),
    [
        (["--a", "1", "--model", "m", "--b"], ["--a", "1", "--b"]),
        (["--model=m", "--a", "1", "--model", "n"], ["--a", "1"]),
        (["--model", "m", "--model_impl", "x"], ["--model_impl", "x"]),
        (["--mod", "m", "--model-load", "x"], ["--mod", "m", "--model-load", "x"]),
        (["--a", "--model"], ["--a"]),
        (["--a", "model"], ["--a", "model"]),
    ],
)
def test_without_takes_the_option_and_its_values_only(argv: list[str], rest: list[str]) -> None:
    assert arguments(*argv).without("--model").argv == tuple(rest)


def test_underscores_in_values_are_kept() -> None:
    assert arguments("--load_format", "some_format").argv == ("--load_format", "some_format")
    assert arguments("--load_format", "some_format").value("--load-format") == "some_format"


def test_bytes_are_kept_from_the_command_and_the_variable(tmp_path: Path) -> None:
    command = [word for value in AWKWARD for word in ("--x", value)]
    parsed, found = parse_arguments(command, shlex.join(command))
    assert parsed.argv == (*command, *command)
    assert found == []
    write_command(tmp_path, [*command, "\udcff"])
    assert read_command(tmp_path) == (*command, "\udcff")


def test_the_variable_is_split_without_expansion() -> None:
    parsed, found = parse_arguments(
        (), """--a '$HOME %d' --b "x # y" --c \\; # --d\n--e ~ --f {1,2}"""
    )
    assert parsed.argv == (
        *("--a", "$HOME %d", "--b", "x # y", "--c", ";", "#", "--d"),
        *("--e", "~", "--f", "{1,2}"),
    )
    assert [fault.code for fault in found] == ["arguments.json"]


@pytest.mark.parametrize("extra", ["--a 'b", '--a "b', "--a b\\"])
def test_unbalanced_quotes(extra: str) -> None:
    (fault,) = faults(extra=extra)
    assert fault.code == "arguments.quoting"
    assert "WARMHOLD_ENGINE_ARGS" in fault.detail


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ('{"a": 1,}', "line 1 column"),
        ('{"a": 1\n "b": 2}', "line 2 column 2"),
        ("{'a': 1}", "line 1 column 2"),
        ('{"a": 1} x', "line 1 column 10"),
        ('\n {"a" 1}', "line 2 column 7"),
        ("{", "line 1 column 2"),
    ],
)
@pytest.mark.parametrize("form", ["--hf-overrides {}", "--hf_overrides={}"])
def test_faulty_json_is_named_with_its_place(form: str, value: str, place: str) -> None:
    words = [word.replace("{}", value) for word in form.split(" ")]
    for found in (faults(*words), faults(extra=shlex.join(words))):
        (fault,) = found
        assert fault.code == "arguments.json"
        assert fault.detail.startswith("--hf-overrides ")
        assert place in fault.detail


@pytest.mark.parametrize(
    "words",
    [
        ["--hf-overrides", '{"a": [1, {"b": null}]}'],
        ["--chat-template", "{% for m in messages %}{{ m }}{% endfor %}"],
        ["--chat_template={{ messages }}"],
        ["--middleware", "a.b"],
        ["{not an option's value"],
    ],
)
def test_sound_values_have_no_fault(words: list[str]) -> None:
    assert faults(*words) == []


def test_an_api_key_that_begins_with_a_brace_is_neither_json_nor_shown() -> None:
    assert faults("--api-key", "{s3cret") == []


@pytest.mark.parametrize(
    ("argv", "port", "sound"),
    [
        ([], 8000, True),
        (["--port", "9000"], 9000, True),
        (["--port=1"], 1, True),
        (["--port", "65535"], 65535, True),
        (["--port", "65536"], 65536, False),
        (["--port", "0"], 0, False),
        (["--port", "-1"], 0, False),
        (["--port", "80a"], 0, False),
        (["--port", "٨٠"], 0, False),
    ],
)
def test_port(argv: list[str], port: int, sound: bool) -> None:
    assert arguments(*argv).port == port
    assert [fault.code for fault in faults(*argv)] == ([] if sound else ["arguments.port"])


def test_every_fault_at_once() -> None:
    found = faults("--port", "x", "--a", "{", "--b", "{]", extra="'")
    assert sorted(fault.code for fault in found) == [
        *("arguments.json", "arguments.json", "arguments.port", "arguments.quoting")
    ]


@pytest.mark.parametrize(
    ("argv", "workers"),
    [
        ([], 1),
        (["--tensor-parallel-size", "2"], 2),
        (["-tp", "2"], 2),
        (["-tp=4"], 4),
        (["--tensor-parallel", "2", "--data-parallel-size=2"], 4),
        (["--tensor_parallel_size=2", "-pp", "3"], 6),
        (["-tp", "2", "-pp", "2", "-dp", "2"], 8),
        (["-tp", "2", "-pcp", "2"], 4),
        (["-tp", "0"], 1),
        (["-tp", "many"], 1),
    ],
)
def test_worker_count(argv: list[str], workers: int) -> None:
    assert arguments(*argv).worker_count == workers


@pytest.mark.parametrize(
    ("argv", "tls", "root_path"),
    [
        ([], False, ""),
        (["--ssl-certfile", "c.pem", "--root-path", "/v/"], True, "/v"),
        (["--root_path=/"], False, ""),
    ],
)
def test_tls_and_root_path(argv: list[str], tls: bool, root_path: str) -> None:
    assert (arguments(*argv).tls, arguments(*argv).root_path) == (tls, root_path)


def test_a_config_file_is_read_and_the_command_wins(tmp_path: Path) -> None:
    config = tmp_path / "vllm.yaml"
    config.write_text("port: 9000\nserved_model_name: [a, b]\nenforce_eager: true\nquiet: false\n")
    arguments, faults = parse_arguments(["--config", str(config)], "")
    assert faults == []
    assert arguments.port == 9000
    assert arguments.values("--served-model-name") == ("a", "b")
    assert arguments.has("--enforce-eager")
    assert not arguments.has("--quiet")
    assert arguments.argv == ("--config", str(config))
    assert parse_arguments(["--config", str(config), "--port", "9001"], "")[0].port == 9001
    assert arguments.without("--config").port == 9000


@pytest.mark.parametrize("text", [None, "port: [1", "- a\n- b\n"])
def test_a_config_file_that_cannot_be_read(tmp_path: Path, text: str | None) -> None:
    config = tmp_path / "vllm.yaml"
    if text is not None:
        config.write_text(text)
    _, faults = parse_arguments(["--config", str(config)], "")
    assert [fault.code for fault in faults] == ["arguments.config"]
    assert str(config) in faults[0].detail


def test_a_config_file_that_vllm_would_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("port: 9000\n")
    _, (fault,) = parse_arguments([f"--config={path}"], "")
    assert (fault.code, fault.remedy) == ("arguments.config", "give two words: --config FILE")
