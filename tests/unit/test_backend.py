# SPDX-License-Identifier: Apache-2.0
"""Who keeps the weights, what is against upstream's holder, and the arguments of both."""

import json
from typing import Any

import pytest
from warmhold_entrypoint.arguments import EngineArguments
from warmhold_entrypoint.log import redact_argv
from warmhold_entrypoint.settings import Settings, read_settings
from warmhold_entrypoint.weight_cache.backend import (
    add_disk_loader,
    add_ipc_loader,
    build_holder_argv,
    choose_backend,
    count_local_ranks,
    find_obstacle,
    has_draft_model,
    health_address,
    socket_dir,
    spans_nodes,
)


def settings(*command: str, **variables: str) -> Settings:
    made, faults, _ = read_settings(
        {f"WARMHOLD_{name}": value for name, value in variables.items()}, command
    )
    assert faults == []
    return made


def test_the_vault_is_the_default_and_what_is_named_is_taken() -> None:
    two = ("--tensor-parallel-size", "2")
    assert choose_backend(settings(*two), True) == "vault"
    for name in ("vault", "vllm", "off"):
        assert choose_backend(settings(*two, WCACHE=name), True) == name


@pytest.mark.parametrize(
    ("command", "backend"),
    [
        ((), "vault"),
        (("-tp", "1"), "vault"),
        (("-tp", "2"), "vllm"),
        (("--pipeline-parallel-size=2",), "vllm"),
        (("-dp", "2"), "vllm"),
        (("-tp", "2", "-pcp", "2"), "vault"),
        (("--enable-expert-parallel",), "vllm"),
        (("-ep",), "vllm"),
        (("-n", "2", "-r", "1"), "vllm"),
        (("--speculative-config", '{"method": "eagle3", "model": "d"}'), "vllm"),
        (("--speculative-config.model", "d"), "vllm"),
        (("-sc.model", "d", "-sc.num_speculative_tokens=2"), "vllm"),
        (("-sc.method=ngram",), "vault"),
        (("--spec-method", "mtp"), "vllm"),
        (("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'), "vault"),
        (("--spec-method", "suffix"), "vault"),
    ],
)
def test_auto(command: tuple[str, ...], backend: str) -> None:
    made = settings(*command, WCACHE="auto")
    assert choose_backend(made, True) == backend
    assert choose_backend(made, False) == "vault"


def test_a_speculative_config_that_is_no_object_drafts_nothing() -> None:
    assert not has_draft_model(EngineArguments(("--speculative-config", "{")))
    assert not has_draft_model(EngineArguments(("--speculative-config", "[1]")))


@pytest.mark.parametrize(
    ("command", "local", "spans"),
    [
        ((), 1, False),
        (("-tp", "4"), 4, False),
        (("-tp", "2", "-pcp", "2"), 4, False),
        (("-tp", "2", "-pp", "2", "-dp", "3"), 12, False),
        (("-tp", "2", "-dp", "8", "-dpl", "2"), 4, True),
        (("-tp", "16", "--nnodes", "2"), 8, True),
    ],
)
def test_ranks_of_this_node(command: tuple[str, ...], local: int, spans: bool) -> None:
    arguments = EngineArguments(command)
    assert (count_local_ranks(arguments), spans_nodes(arguments)) == (local, spans)


def obstacle(*command: str, **changes: Any) -> str:
    variables = {"WCACHE": "vllm", **changes.pop("variables", {})}
    given = {"on_gpu": True, "rocm": False, "version": "0.33.0", "environment": {}, **changes}
    found = find_obstacle(settings(*command, **variables), **given)
    assert found is None or (found.code, found.mode) == ("ipc_cache.unsupported", "ipc_cache")
    return found.detail if found else ""


def test_what_is_against_the_holder() -> None:
    assert obstacle("-tp", "2") == ""
    assert "ROCm" in obstacle(rocm=True, on_gpu=False)
    assert "no NVIDIA GPU" in obstacle(on_gpu=False)
    assert "mode copy" in obstacle("--model-loader-extra-config", '{"mode": "copy"}')
    assert obstacle("--model-loader-extra-config", '{"mode": "zero_copy"}') == ""
    assert "knows no" in obstacle("-pcp", "2")
    assert "with a dot" in obstacle("--model-loader-extra-config.mode", "copy")
    allocator = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert "expandable_segments" in obstacle(environment=allocator)
    assert "0.32.1" in obstacle("-pp", "2", version="0.32.1")
    assert obstacle("-pp", "2", version="0.33.0") == obstacle("-pp", "2", version="1.0") == ""
    assert "too long" in obstacle(variables={"RUN_DIR": "/" + "x" * 60})
    many = ("-tp", "16", "--nnodes", "2")
    assert "--weight-cache-master-port" in obstacle(*many)
    given = {"PRELOAD_ARGS": "--weight-cache-master-port 29600"}
    assert obstacle(*many, variables=given) == ""


def test_the_holder_gets_the_engines_arguments_and_none_of_the_servers() -> None:
    made = settings(
        *("--model", "m", "--port", "8000", "--host=::", "--api-key", "a", "b", "-tp", "2"),
        *("--nnodes", "2", "--node-rank", "1", "--data-parallel-size", "2"),
        *("--data-parallel-size-local", "1", "--data-parallel-start-rank", "1"),
        *("--data-parallel-address", "10.0.0.1", "--enable-expert-parallel", "--headless"),
        *("--no-enable-flashinfer-autotune", "--no-enable-log-deltas", "--enable-log-requests"),
        *("--enable-sleep-mode", "--chat-template", "{{ x }}"),
        *("--load-format", "safetensors", "--model_loader_extra_config"),
        '{"enable_multithread_load": true, "state_timeout_s": 7, "fallback": true}',
    )
    argv = build_holder_argv(made, "/m", 5)
    assert argv == (
        *("vllm", "preload", "--model", "/m", "-tp", "2"),
        *("--nnodes", "2", "--node-rank", "1", "--data-parallel-size", "2"),
        *("--data-parallel-size-local", "1", "--data-parallel-start-rank", "1"),
        *("--data-parallel-address", "10.0.0.1", "--enable-expert-parallel"),
        *("--no-enable-flashinfer-autotune", "--load-format", "safetensors"),
        *("--model-loader-extra-config", '{"enable_multithread_load": true}'),
        *("--weight-cache-socket-dir", "/run/warmhold/holder"),
        *("--weight-cache-health-host", "127.0.0.1", "--weight-cache-health-port", "5"),
    )


def test_what_is_said_about_the_holder_itself_comes_last() -> None:
    text = (
        "--weight-cache-socket-dir /s --weight-cache-health-host 0.0.0.0"
        " --weight-cache-health-port 81 --weight-cache-draft-master-port 82 --seed-token hush"
    )
    made = settings("--load-format", "ipc_cache", PRELOAD_ARGS=text)
    argv = build_holder_argv(made, "/m", 5)
    assert argv == ("vllm", "preload", "--model", "/m", *text.split())
    assert "hush" not in redact_argv(argv) and "hush" not in repr(made)
    assert socket_dir(made) == "/s"
    assert health_address(made, 5) == ("127.0.0.1", 81)
    assert health_address(settings(), 5) == ("127.0.0.1", 5)
    there = settings(PRELOAD_ARGS="--weight-cache-health-host 10.0.0.9")
    assert health_address(there, 5) == ("10.0.0.9", 5)


def test_what_a_config_file_says_reaches_the_holder(tmp_path: Any) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_text("tensor-parallel-size: 2\nport: 9\nquantization: fp8\n")
    argv = build_holder_argv(settings("--config", str(path), "--seed", "3"), "/m", 5)
    words = ("--tensor-parallel-size", "2", "--quantization", "fp8", "--seed", "3")
    assert argv[4:10] == words


def test_preload_arguments_that_cannot_be_split_are_a_fault() -> None:
    _, faults, _ = read_settings({"WARMHOLD_PRELOAD_ARGS": "'"}, ())
    assert [fault.code for fault in faults] == ["arguments.quoting"]
    assert "WARMHOLD_PRELOAD_ARGS" in faults[0].detail


def test_the_engine_has_no_way_back_to_the_disk() -> None:
    text = '{"fallback": true, "state_timeout_s": 7, "socket_path": "/x", "threads": 2}'
    made = settings("--model-loader-extra-config", text)
    *start, extra = add_ipc_loader(made, ["vllm", "serve", "/m"])
    assert start[3:] == ["--load-format", "ipc_cache", "--model-loader-extra-config"]
    folder = "/run/warmhold/holder"
    assert json.loads(extra) == {"state_timeout_s": 7, "fallback": False, "socket_dir": folder}


def test_a_start_from_disk_has_the_users_own_loader() -> None:
    base = ["vllm", "serve", "/m"]
    assert add_disk_loader(settings(), base) == tuple(base)
    assert add_disk_loader(settings("--load-format", "ipc_cache"), base) == tuple(base)
    text = '{"fallback": false, "threads": 2}'
    chosen = settings("--load-format", "pt", "--model-loader-extra-config", text)
    more = ("--load-format", "pt", "--model-loader-extra-config", '{"threads": 2}')
    assert add_disk_loader(chosen, base) == (*base, *more)
