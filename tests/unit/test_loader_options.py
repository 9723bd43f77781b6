# SPDX-License-Identifier: Apache-2.0
"""The loader's settings: upstream's keys keep their meaning, wrong values are named."""

from pathlib import Path
from typing import Any

import pytest
from warmhold_wcache.vllm_plugin.options import Source, read_options


@pytest.mark.parametrize(
    ("extra", "load_format", "source", "copy"),
    [
        ({}, "warmhold", Source.AUTO, False),
        ({"mode": "disk"}, "warmhold", Source.DISK, False),
        ({"mode": "ipc_cache"}, "warmhold", Source.IPC_CACHE, False),
        ({"mode": "copy"}, "ipc_cache", Source.AUTO, True),
        ({"mode": "zero_copy"}, "ipc_cache", Source.AUTO, False),
        ({"fallback": False}, "ipc_cache", Source.IPC_CACHE, False),
        ({"fallback": False}, "warmhold", Source.AUTO, False),
        ({"mode": "copy", "source": "ipc_cache"}, "warmhold", Source.IPC_CACHE, True),
    ],
)
def test_where_weights_come_from(
    extra: dict[str, Any], load_format: str, source: Source, copy: bool
) -> None:
    options = read_options(extra, load_format)
    assert (options.source, options.copy) == (source, copy)


def test_the_socket() -> None:
    assert read_options({}, "warmhold").socket_path == Path("/run/warmhold/wcache.sock")
    assert read_options({"socket_dir": "/x"}, "ipc_cache").socket_path == Path("/x/wcache.sock")
    both = {"socket_dir": "/x", "socket_path": "/y/z.sock"}
    assert read_options(both, "ipc_cache").socket_path == Path("/y/z.sock")


def test_a_file_counts_less_than_what_stands_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "loader.json"
    file.write_text('{"socket_path": "/f/s", "publish": false, "launch_key": {"a": "b"}, "n": 1}')
    options = read_options({"file": str(file), "n": 2}, "warmhold")
    assert (options.socket_path, options.publish) == (Path("/f/s"), False)
    assert (options.launch_key, options.rest) == ({"a": "b"}, {"n": 2})
    own = read_options({"file": str(file), "socket_dir": "/x"}, "warmhold")
    assert own.socket_path == Path("/x/wcache.sock")


@pytest.mark.parametrize("content", [None, "", "[1]", "{"])
def test_a_file_without_settings_is_named(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "loader.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=str(file)):
        read_options({"file": str(file)}, "warmhold")


def test_what_is_not_known_is_vllms() -> None:
    options = read_options({"enable_multithread_load": True, "is_draft": True}, "warmhold")
    assert options.rest == {"enable_multithread_load": True}


@pytest.mark.parametrize(
    "extra",
    [
        {"mode": "maybe"},
        {"source": "tape"},
        {"fallback": "no"},
        {"release": 1},
        {"connect_timeout_s": 0},
        {"state_timeout_s": "5"},
        {"segment_bytes": 5},
        {"segment_bytes": True},
        {"cpu_linear": "fast"},
        {"launch_key": "x"},
    ],
)
def test_a_wrong_value_is_named(extra: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(extra))):
        read_options(extra, "warmhold")
