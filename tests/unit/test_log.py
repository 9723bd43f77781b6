# SPDX-License-Identifier: Apache-2.0
"""Log lines: one for each event, readable by people or by machines, and no secrets."""

import json
import logging
import re
from collections.abc import Iterator

import pytest
from warmhold_entrypoint.log import Log, configure_logging, redact_argv

LOG = Log("test")
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    logger = logging.getLogger("warmhold")
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before


def test_text(capsys: Capture) -> None:
    configure_logging({})
    LOG.info("plan made", mode="disk", count=3, took_s=1.23456, nothing=None)
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    stamp, _, rest = stderr.partition(" ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", stamp)
    assert rest == "INFO warmhold.test plan made mode=disk count=3 took_s=1.235 nothing=None\n"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain/path-1.2:3,4", "plain/path-1.2:3,4"),
        ("two words", '"two words"'),
        ('say "hi"', r'"say \"hi\""'),
        ("a=b", '"a=b"'),
        ("line\nfeed", r'"line\nfeed"'),
        ("\x1b[31m", r'"\u001b[31m"'),
        ("", '""'),
        ("é", "é"),
    ],
)
def test_text_values_are_quoted_where_needed(capsys: Capture, value: str, shown: str) -> None:
    configure_logging({})
    LOG.info("m", value=value)
    assert capsys.readouterr().err.endswith(f" m value={shown}\n")


def test_json(capsys: Capture) -> None:
    configure_logging({"WARMHOLD_LOG_FORMAT": "json"})
    LOG.warning("m", text='two\n"lines"', number=1.5, items=["a"], other={"s"})
    (line,) = capsys.readouterr().err.splitlines()
    entry = json.loads(line)
    assert entry.pop("time").endswith("Z")
    assert entry == {
        "level": "WARNING",
        "logger": "warmhold.test",
        "message": "m",
        "text": 'two\n"lines"',
        "number": 1.5,
        "items": ["a"],
        "other": "{'s'}",
    }


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_traceback_is_kept(capsys: Capture, log_format: str) -> None:
    configure_logging({"WARMHOLD_LOG_FORMAT": log_format})
    try:
        raise ValueError("why")
    except ValueError:
        LOG.error("m", exc_info=True, field=1)
    text = capsys.readouterr().err
    assert "Traceback" in text and "ValueError: why" in text
    assert (len(text.splitlines()) == 1) is (log_format == "json")


@pytest.mark.parametrize(
    ("level", "shown"),
    [("debug", "diwe"), ("info", "iwe"), ("warning", "we"), ("error", "e"), ("WARNING", "we")],
)
def test_levels(capsys: Capture, level: str, shown: str) -> None:
    configure_logging({"WARMHOLD_LOG_LEVEL": level})
    LOG.debug("d")
    LOG.info("i")
    LOG.warning("w")
    LOG.error("e")
    words = [line.split()[3] for line in capsys.readouterr().err.splitlines()]
    assert words == [letter for letter in "diwe" if letter in shown]


def test_configured_twice_logs_once(capsys: Capture) -> None:
    configure_logging({"WARMHOLD_LOG_FORMAT": "json"})
    configure_logging({})
    LOG.info("m")
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        ("--api-key k --seed 1", "--api-key *** --seed 1"),
        ("--api_key k1 k2 --seed 1", "--api_key *** *** --seed 1"),
        ("--api-key=k --seed 1", "--api-key=*** --seed 1"),
        ("--hf-token=k=k", "--hf-token=***"),
        ("--hf_token k", "--hf_token ***"),
        ("--api-key k1 --api-key k2", "--api-key *** --api-key ***"),
        ("--api-key -123 - k", "--api-key *** *** ***"),
        ("--api-keys k --seed=1", "--api-keys k --seed=1"),
        ("--api-k k1 k2 --seed 1", "--api-k *** *** --seed 1"),
        ("--hf_tok=k --seed-to k --p k", "--hf_tok=*** --seed-to *** --p k"),
        ("serve k --api-key", "serve k --api-key"),
    ],
)
def test_secret_arguments_are_hidden(argv: str, shown: str) -> None:
    words = argv.split()
    assert redact_argv(words) == shown.split()
    assert words == argv.split()
