# SPDX-License-Identifier: Apache-2.0
"""The plan as a table: every mode, every rejection, every fault, and the arithmetic."""

import dataclasses
import json
from typing import Any

import pytest
from warmhold_entrypoint import plan as plan_module
from warmhold_entrypoint import start
from warmhold_entrypoint.budget import GIB, MIB, choose_kv_bytes, choose_threads
from warmhold_entrypoint.command import (
    build_engine_environment,
    build_fetch_argv,
    inherit_environment,
)
from warmhold_entrypoint.errors import Fault, Rejection
from warmhold_entrypoint.facts import Facts
from warmhold_entrypoint.gpus.gpu import Gpu, Gpus
from warmhold_entrypoint.model import Model
from warmhold_entrypoint.plan import Plan, decide
from warmhold_entrypoint.settings import Settings, read_settings
from warmhold_entrypoint.snapshot_mode.snapshots import Candidate, Snapshots
from warmhold_entrypoint.weight_cache.resident import Vault
from warmhold_wcache.content import Content, FileVersion

FACTS = Facts(
    build_id="b1",
    vllm_version="0.32.0",
    device="cpu-12345678",
    cpu_quota=None,
    cpu_affinity=8,
    numa_nodes=1,
    memory_limit_bytes=32 * GIB,
    memory_limited_by="cgroup limit",
    shm_total_bytes=GIB,
    shm_free_bytes=GIB,
    state_free_bytes=100 * GIB,
    has_caches=False,
    model=Model("demo", "/opt/warmhold/demo", GIB // 4),
    content=Content("c0", (FileVersion("/opt/warmhold/demo/model.safetensors", 9, 1, 1, 1),)),
    vault=Vault(),
    plugins=("lora", "warmhold"),
    packages=("vllm-0.32.0",),
    cache_dir="/state/cache/b1-0.32.0-cpu-12345678",
    faults=(),
)
ROOMY_KV = 4 * GIB


def settings(*command: str, **variables: str) -> Settings:
    made, faults, _ = read_settings(
        {f"WARMHOLD_{name}": value for name, value in variables.items()}, command
    )
    assert faults == []
    return made


def facts(**changes: Any) -> Facts:
    return dataclasses.replace(FACTS, **changes)


def codes(plan: Plan) -> list[str]:
    return [fault.code for fault in plan.faults]


def options(plan: Plan, attempt: int = 0) -> dict[str, str]:
    """Given a plan, return an attempt's options after the model, each with one value."""
    argv = plan.attempts[attempt].argv
    assert argv[:2] == ("vllm", "serve")
    return dict(zip(argv[3::2], argv[4::2], strict=True))


def extra(plan: Plan, attempt: int = 0) -> dict[str, Any]:
    """Given a plan, return what an attempt tells the loader."""
    return dict(json.loads(options(plan, attempt)["--model-loader-extra-config"]))


def resident(wanted: Settings, **changes: Any) -> Vault:
    """A vault that holds what these settings want, but for the changed fields of the launch key."""
    key = {**decide(wanted, FACTS).loader["launch_key"], **changes}
    return Vault(rows=({"id": "g1", "model": "m", "bytes": GIB // 4, "launch_key": key},))


# Modes


@pytest.mark.parametrize(
    ("mode", "warm", "attempts", "rejections", "faults"),
    [
        ("auto", False, ["disk"], ["snapshot.absent", "ipc_cache.absent"], []),
        ("auto", True, ["ipc_cache", "disk"], ["snapshot.absent"], []),
        ("disk", True, ["disk"], ["snapshot.not-wanted", "ipc_cache.not-wanted"], []),
        ("ipc_cache", True, ["ipc_cache"], ["snapshot.not-wanted", "disk.not-wanted"], []),
        (
            "snapshot",
            True,
            [],
            ["snapshot.absent", "ipc_cache.not-wanted", "disk.not-wanted"],
            ["mode.unavailable"],
        ),
        (
            "ipc_cache",
            False,
            [],
            ["snapshot.not-wanted", "ipc_cache.absent", "disk.not-wanted"],
            ["mode.unavailable"],
        ),
    ],
)
def test_modes(
    mode: str, warm: bool, attempts: list[str], rejections: list[str], faults: list[str]
) -> None:
    wanted = settings(MODE=mode)
    vault = resident(settings()) if warm else Vault()
    plan = decide(wanted, facts(vault=vault))
    assert [attempt.mode for attempt in plan.attempts] == attempts
    assert [rejection.code for rejection in plan.rejections] == rejections
    assert codes(plan) == faults
    for rejection in plan.rejections:
        assert rejection.code.startswith(f"{rejection.mode}.")
        assert rejection.detail and rejection.remedy


FITS = Snapshots("", "one fits", "", "one", {"kernel": "k"})


@pytest.mark.parametrize(
    ("mode", "warm", "attempts"),
    [
        ("auto", True, ["snapshot", "ipc_cache", "disk"]),
        ("auto", False, ["snapshot", "disk"]),
        ("snapshot", True, ["snapshot"]),
        ("ipc_cache", True, ["ipc_cache"]),
        ("disk", True, ["disk"]),
    ],
)
def test_a_snapshot_that_fits_comes_first(mode: str, warm: bool, attempts: list[str]) -> None:
    vault = resident(settings()) if warm else Vault()
    plan = decide(settings(MODE=mode), facts(vault=vault, snapshots=FITS))
    assert [attempt.mode for attempt in plan.attempts] == attempts
    assert [item.snapshot for item in plan.attempts if item.snapshot] == ["one"] * (
        "snapshot" in attempts
    )
    assert codes(plan) == []


@pytest.mark.parametrize(
    ("user", "added", "kept"),
    [
        ({}, {"HF_HUB_OFFLINE": "1"}, False),
        ({}, {}, True),
        ({"HF_HUB_OFFLINE": "true"}, {}, False),
        ({"HF_HUB_OFFLINE": "On"}, {}, False),
        ({"TRANSFORMERS_OFFLINE": "yes"}, {}, False),
        ({"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "1"}, {}, True),
    ],
)
def test_the_hubs_token_is_only_for_downloads(
    user: dict[str, str], added: dict[str, str], kept: bool
) -> None:
    environ = {"HF_TOKEN": "hf_1", "HUGGING_FACE_HUB_TOKEN": "hf_2", "PATH": "/bin", **user}
    wanted, _, _ = read_settings(environ, ())
    found = inherit_environment(wanted, added)
    assert ({"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"} <= set(found)) is kept
    assert ("HF_TOKEN" in found) is kept and found["PATH"] == "/bin"


@pytest.mark.parametrize("own", [["--hf-token", "hf_1"], ["--hf_token=hf_1"], ["--hf-token"]])
def test_the_hubs_token_is_in_no_argv_of_an_engine_that_downloads_nothing(own: list[str]) -> None:
    plan = decide(settings(*own, "--seed", "1"), FACTS)
    assert "hf_1" not in repr(plan)
    assert options(plan)["--seed"] == "1"
    assert not any(item.startswith(("--hf-token", "--hf_token")) for item in plan.attempts[0].argv)
    online, _, _ = read_settings({"HF_HUB_OFFLINE": "0"}, own)
    asked = decide(online, FACTS)
    assert tuple(own) == asked.attempts[0].argv[3 : 3 + len(own)]
    assert "hf_1" not in asked.to_json()


def test_a_download_has_the_token_of_the_arguments() -> None:
    missing = facts(model=Model("o/n", None, 0))
    wanted = settings("--hf-token", "hf_1", MODEL="o/n")
    added = decide(wanted, missing).environment
    assert inherit_environment(wanted, added)["HF_TOKEN"] == "hf_1"
    fetched = decide(wanted, facts(model=Model("o/n", "/models/x", 0))).environment
    assert "HF_TOKEN" not in inherit_environment(wanted, fetched)


@pytest.mark.parametrize(("value", "offline"), [("", "1"), ("0", "0"), ("true", "true")])
def test_an_empty_variable_does_not_send_an_engine_online(value: str, offline: str) -> None:
    wanted, _, _ = read_settings({"HF_HUB_OFFLINE": value}, ())
    environment = inherit_environment(wanted, build_engine_environment(wanted, FACTS))
    assert environment["HF_HUB_OFFLINE"] == offline


def test_why_no_snapshot_is_told_as_it_was_found() -> None:
    found = Snapshots("snapshot.identity-mismatch", "kernel", "create one")
    plan = decide(settings(), facts(snapshots=found))
    assert plan.rejections[0] == Rejection("snapshot", found.code, "kernel", "create one")


def test_the_users_own_loader_is_tried_once_after_a_snapshot() -> None:
    wanted = settings("--load-format", "ipc_cache")
    plan = decide(wanted, facts(vault=resident(wanted), snapshots=FITS))
    assert [attempt.mode for attempt in plan.attempts] == ["snapshot", "ipc_cache"]


def test_a_mode_that_failed_comes_first_among_the_reasons() -> None:
    plan = decide(settings(), FACTS)
    failed = Rejection("snapshot", "snapshot.canary", "why", "do")
    assert plan.reject(failed).rejections == (failed, *plan.rejections)


@pytest.mark.parametrize(
    ("mode", "code", "source"),
    [
        *(("auto", code, "auto") for code in ("loading", "absent", "hung", "dead-socket")),
        ("disk", "hung", "disk"),
        ("ipc_cache", "loading", "ipc_cache"),
    ],
)
def test_the_loader_looks_for_itself_where_the_forecast_may_be_wrong(
    mode: str, code: str, source: str
) -> None:
    plan = decide(settings(MODE=mode), facts(vault=Vault(code, "why")))
    assert extra(plan)["source"] == source
    if mode == "auto":
        (reason,) = [item for item in plan.rejections if item.mode == "ipc_cache"]
        assert (reason.code, reason.detail) == (f"ipc_cache.{code}", "why")


def test_after_a_failed_hit_comes_the_disk_alone() -> None:
    plan = decide(settings(), facts(vault=resident(settings())))
    assert [extra(plan, index)["source"] for index in (0, 1)] == ["auto", "disk"]


@pytest.mark.parametrize(
    ("command", "changed", "field"),
    [
        ([], {"content": "other"}, "content (other → c0)"),
        (["--dtype", "float16"], {}, "argument.dtype (none → float16)"),
        ([], {"cpu_linear": "packed"}, "cpu_linear (packed → shared)"),
        ([], {"variable.VLLM_X": "1"}, "variable.VLLM_X (1 → none)"),
    ],
)
def test_a_mismatch_names_the_fields(
    command: list[str], changed: dict[str, str], field: str
) -> None:
    plan = decide(settings(*command), facts(vault=resident(settings(), **changed)))
    reason = plan.rejections[1]
    assert reason.code == "ipc_cache.key-mismatch"
    assert field in reason.detail
    assert [attempt.mode for attempt in plan.attempts] == ["disk"]
    assert extra(plan)["source"] == "auto"


def test_what_changes_no_weights_is_no_mismatch() -> None:
    vault = resident(settings())
    for command in (["--port", "9"], ["--kv-cache-memory-bytes", "1G"], ["--load-format", "auto"]):
        assert decide(settings(*command), facts(vault=vault)).attempts[0].mode == "ipc_cache"


def test_a_named_mode_fails_with_its_own_reason() -> None:
    (fault,) = decide(settings(MODE="snapshot"), FACTS).faults
    assert fault.detail.startswith("snapshot: snapshot.absent: ")


@pytest.mark.parametrize(
    ("changes", "code", "numbers"),
    [
        ({"shm_free_bytes": 64 * MIB, "shm_total_bytes": 100 * MIB}, "shm.too-small", "64 100 256"),
        ({"state_free_bytes": 10 * MIB}, "settings.state-full", "10 256 /var/lib/warmhold"),
        ({"memory_limit_bytes": 2 * GIB}, "memory.too-small", "2.50 0.25 2.00 cgroup"),
        ({"faults": (Fault("port.taken", "by x", "end x"),)}, "port.taken", "x"),
    ],
)
@pytest.mark.parametrize("mode", ["auto", "disk"])
def test_a_fault_leaves_no_attempt(
    mode: str, changes: dict[str, Any], code: str, numbers: str
) -> None:
    plan = decide(settings(MODE=mode), facts(**changes))
    assert (codes(plan), plan.attempts) == ([code], ())
    assert [word for word in numbers.split() if word not in plan.faults[0].detail] == []


def test_every_fault_at_once() -> None:
    poor = facts(
        faults=(Fault("model.missing", "", ""),),
        shm_free_bytes=0,
        state_free_bytes=0,
        memory_limit_bytes=GIB,
    )
    assert sorted(codes(decide(settings(MODE="ipc_cache"), poor))) == [
        *("memory.too-small", "mode.unavailable", "model.missing"),
        *("settings.state-full", "shm.too-small"),
    ]


# Memory


@pytest.mark.parametrize(
    ("limit_gib", "command", "variables", "kv_bytes"),
    [
        (32, [], {}, ROOMY_KV),
        (4.25, [], {}, GIB),
        (2.75, [], {}, 256 * MIB),
        (2.5, [], {}, 256 * MIB),
        (32, ["-tp", "2"], {}, ROOMY_KV),
        (5.25, ["-tp", "2"], {}, GIB),
        (32, [], {"KV_CACHE_GIB": "0.5"}, GIB // 2),
        (32, [], {"KV_CACHE_GIB": "20"}, 20 * GIB),
        (32, ["--kv-cache-memory-bytes", "99"], {}, None),
        (32, ["--kv_cache_memory_bytes=2G"], {}, None),
        (32, ["--gpu-memory-utilization", "0.5"], {}, None),
    ],
)
def test_kv_cache(
    limit_gib: float, command: list[str], variables: dict[str, str], kv_bytes: int | None
) -> None:
    found = facts(memory_limit_bytes=int(limit_gib * GIB))
    assert choose_kv_bytes(settings(*command, **variables), found) == (kv_bytes, None)


@pytest.mark.parametrize(
    ("limit_gib", "command", "variables", "numbers"),
    [
        (2.49, [], {}, ["2.50", "0.25", "0.25", "2.00", "2.49"]),
        (3, [], {"KV_CACHE_GIB": "1"}, ["3.25", "0.25", "1.00", "2.00", "3.00"]),
        (4, ["--kv-cache-memory-bytes", str(2 * GIB)], {}, ["4.25", "2.00", "4.00"]),
        (4, ["--kv-cache-memory-bytes", "2G"], {}, ["4.25", "2.00", "4.00"]),
        (4, ["--kv-cache-memory-bytes=2.2g"], {}, ["4.30", "2.05", "4.00"]),
        (3, ["-tp", "2"], {}, ["3.50", "3.00"]),
    ],
)
def test_too_little_memory_is_told_with_its_numbers(
    limit_gib: float, command: list[str], variables: dict[str, str], numbers: list[str]
) -> None:
    found = facts(memory_limit_bytes=int(limit_gib * GIB))
    _, fault = choose_kv_bytes(settings(*command, **variables), found)
    assert fault is not None
    assert fault.code == "memory.too-small"
    assert [number for number in numbers if f"{number} GiB" not in fault.detail] == []


def test_a_kv_cache_that_was_asked_for_is_given_even_beside_a_share_of_the_memory() -> None:
    asked = settings("--gpu-memory-utilization", "0.5", KV_CACHE_GIB="2")
    assert choose_kv_bytes(asked, FACTS) == (2 * GIB, None)


def test_the_kv_cache_that_the_engine_is_given_is_the_one_that_must_fit() -> None:
    asked = settings("--kv-cache-memory-bytes", str(GIB), KV_CACHE_GIB="100")
    assert choose_kv_bytes(asked, FACTS) == (None, None)


def test_vllms_own_variable_for_the_kv_cache_has_the_last_word() -> None:
    variables = {"VLLM_CPU_KVCACHE_SPACE": "3", "WARMHOLD_KV_CACHE_GIB": "1"}
    asked, _, _ = read_settings(variables, [])
    assert choose_kv_bytes(asked, FACTS) == (3 * GIB, None)
    _, fault = choose_kv_bytes(asked, facts(memory_limit_bytes=4 * GIB))
    assert fault is not None and "KV cache 3.00 GiB" in fault.detail
    asked, _, _ = read_settings({**variables, "VLLM_CPU_KVCACHE_SPACE": ""}, [])
    assert choose_kv_bytes(asked, FACTS) == (GIB, None)


def test_other_resident_weights_count() -> None:
    vault = Vault(rows=({"bytes": 2 * GIB, "launch_key": {"content": "x"}},))
    assert codes(decide(settings(), facts(memory_limit_bytes=4 * GIB, vault=vault))) == [
        "memory.too-small"
    ]
    (fault,) = decide(settings(), facts(memory_limit_bytes=4 * GIB, vault=vault)).faults
    assert "other resident weights 2.00 GiB" in fault.detail
    assert "wcache status" in fault.remedy
    alone = decide(settings(), facts(memory_limit_bytes=4 * GIB))
    assert not alone.faults
    warm = decide(settings(), facts(memory_limit_bytes=4 * GIB, vault=resident(settings())))
    assert warm.kv_cache_bytes == alone.kv_cache_bytes
    private = facts(memory_limit_bytes=4 * GIB, vault=resident(settings()))
    again = decide(settings(MODE="disk"), private)
    assert (again.kv_cache_bytes or 0) < (alone.kv_cache_bytes or 0)


def test_a_copy_that_does_not_fit_is_not_made_resident() -> None:
    """Packed layers hold copies of their own: twice the weights."""
    found = facts(model=Model("demo", "/demo", 4 * GIB), memory_limit_bytes=8 * GIB)
    plan = decide(settings(CPU_LINEAR="packed"), found)
    assert not plan.faults
    assert plan.loader["publish"] is False
    assert plan.rejections[1].code == "ipc_cache.memory"
    assert "10.25 GiB" in plan.rejections[1].detail
    roomy = dataclasses.replace(found, memory_limit_bytes=16 * GIB)
    assert decide(settings(CPU_LINEAR="packed"), roomy).loader["publish"] is True
    assert decide(settings(CPU_LINEAR="shared"), found).loader["publish"] is True


# Threads


@pytest.mark.parametrize(
    ("quota", "affinity", "shares"),
    [
        (0.5, 8, [1, 1, 1]),
        (2.5, 8, [2, 1, 1]),
        (8, 8, [8, 4, 1]),
        (8, 4, [4, 2, 1]),
        (None, 8, [8, 4, 1]),
    ],
)
def test_threads_of_each_worker(quota: float | None, affinity: int, shares: list[int]) -> None:
    found = facts(cpu_quota=quota, cpu_affinity=affinity)
    assert [choose_threads(settings("-tp", str(workers)), found) for workers in (1, 2, 8)] == shares


@pytest.mark.parametrize(
    ("quota", "bound"), [(2.5, True), (0.5, True), (8, False), (16, False), (None, False)]
)
def test_a_quota_keeps_threads_from_being_bound_to_cores(quota: float | None, bound: bool) -> None:
    environment = build_engine_environment(settings(), facts(cpu_quota=quota))
    assert ("VLLM_CPU_OMP_THREADS_BIND" in environment) is bound
    if bound:
        assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
        assert environment["OMP_NUM_THREADS"] == str(max(1, int(quota or 0)))


@pytest.mark.parametrize(
    ("workers", "nodes", "bound"), [(1, 1, False), (2, 1, True), (2, 2, False)]
)
def test_workers_without_a_numa_node_each_are_not_bound(
    workers: int, nodes: int, bound: bool
) -> None:
    found = facts(numa_nodes=nodes)
    environment = build_engine_environment(settings("-tp", str(workers)), found)
    assert ("VLLM_CPU_OMP_THREADS_BIND" in environment) is bound


# The engine's argv


def test_argv_of_the_demo() -> None:
    plan = decide(settings(), FACTS)
    assert plan.attempts[0].argv[2] == "/opt/warmhold/demo"
    assert options(plan) == {
        "--served-model-name": "demo",
        "--shutdown-timeout": "30",
        "--disable-access-log-for-endpoints": "/health,/metrics",
        "--kv-cache-memory-bytes": str(ROOMY_KV),
        "--distributed-executor-backend": (
            "warmhold_wcache.vllm_plugin.one_process.OneProcessExecutor"
        ),
        "--load-format": "warmhold",
        "--model-loader-extra-config": '{"file": "/run/warmhold/loader.json", "source": "auto"}',
    }


@pytest.mark.parametrize("words", ["-tp 2", "-dp 2 --api-server-count 1", "-pp 2"])
def test_several_workers_have_processes_of_their_own(words: str) -> None:
    plan = decide(settings(*words.split()), facts(numa_nodes=2))
    assert all("--distributed-executor-backend" not in item.argv for item in plan.attempts)


@pytest.mark.parametrize(
    "own",
    [
        ["--served_model_name", "a", "b"],
        ["--shutdown-timeout=5"],
        ["--disable-access-log-for-endpoints", "/x"],
        ["--kv-cache-memory-bytes", "1073741824"],
        ["--distributed-executor-backend", "mp"],
        ["--hf-overrides", '{"a":\n "% $HOME ; # \\""}'],
    ],
)
def test_the_users_arguments_are_kept_and_not_doubled(own: list[str]) -> None:
    (attempt,) = decide(settings(*own), FACTS).attempts
    assert attempt.argv[3 : 3 + len(own)] == tuple(own)
    name = own[0].partition("=")[0].replace("_", "-")
    spelt = [item.partition("=")[0].replace("_", "-") for item in attempt.argv]
    assert spelt.count(name) == 1


def test_the_directory_takes_the_place_of_model_and_revision() -> None:
    found = facts(model=Model("o/n", "/models/x", 0))
    (attempt,) = decide(settings("--model", "o/n", "--revision=v1", "--seed", "1"), found).attempts
    assert attempt.argv[:5] == ("vllm", "serve", "/models/x", "--seed", "1")
    assert not {"--model", "--revision=v1", "v1"} & set(attempt.argv)
    assert attempt.argv[attempt.argv.index("--served-model-name") + 1] == "o/n"


def test_what_is_not_there_yet_is_fetched_by_its_name() -> None:
    missing = facts(model=Model("o/n", None, 0))
    plan = decide(settings(MODEL="o/n"), missing)
    assert plan.model_directory is None
    assert "HF_HUB_OFFLINE" not in plan.environment
    assert build_fetch_argv(settings("--revision", "v1", MODEL="o/n")) == (
        *("hf", "download", "o/n", "--revision", "v1", "--cache-dir", "/models/hub"),
    )
    assert "--revision" not in build_fetch_argv(settings(MODEL="o/n"))


# The weight loader


def test_a_format_that_goes_its_own_way_keeps_its_argv() -> None:
    own = ["--load-format", "runai_streamer", "--model-loader-extra-config", '{"a": 1}']
    plan = decide(settings(*own, CPU_LINEAR="shared"), FACTS)
    assert plan.attempts[0].argv[3:7] == tuple(own)
    assert "warmhold" not in plan.attempts[0].argv
    assert plan.rejections[1].code == "ipc_cache.unsupported"
    assert plan.loader == {}


@pytest.mark.parametrize("name", ["safetensors", "PT", "dummy"])
def test_a_format_that_is_read_by_the_loader_is_handed_on(name: str) -> None:
    plan = decide(settings("--load-format", name), FACTS)
    assert plan.loader["disk_format"] == name.lower()
    assert options(plan)["--load-format"] == "warmhold"
    assert plan.attempts[0].argv.count("--load-format") == 1


def test_the_loaders_own_format_is_the_users_choice() -> None:
    own = ["--load-format", "ipc_cache", "--model-loader-extra-config", '{"fallback": false}']
    plan = decide(settings(*own), FACTS)
    assert len(plan.attempts) == 1
    assert options(plan)["--load-format"] == "ipc_cache"
    assert extra(plan) == {"file": "/run/warmhold/loader.json", "fallback": False}
    assert plan.loader["disk_format"] == "auto"


def test_the_users_loader_options_win() -> None:
    plan = decide(settings("--model-loader-extra-config", '{"source": "disk", "n": 2}'), FACTS)
    assert extra(plan) == {"file": "/run/warmhold/loader.json", "source": "disk", "n": 2}


def test_without_a_vault_the_linear_path_is_the_same() -> None:
    plan = decide(settings(WCACHE="off"), facts(vault=Vault("off", "WARMHOLD_WCACHE=off")))
    assert (plan.loader["publish"], plan.loader["cpu_linear"]) == (False, "shared")
    assert extra(plan)["source"] == "disk"


@pytest.mark.parametrize(
    ("chosen", "plugins"),
    [(None, "lora,warmhold"), ("mine", "mine,warmhold"), ("warmhold,x", "warmhold,x")],
)
def test_our_plugin_is_loaded_and_no_other_is_lost(chosen: str | None, plugins: str) -> None:
    environ = {} if chosen is None else {"VLLM_PLUGINS": chosen}
    made, _, _ = read_settings(environ, ())
    assert build_engine_environment(made, FACTS)["VLLM_PLUGINS"] == plugins


def test_a_variable_of_the_user_is_kept() -> None:
    made, _, _ = read_settings({"VLLM_CACHE_ROOT": "/x", "HOME": "/root"}, ())
    environment = build_engine_environment(made, FACTS)
    assert not {"VLLM_CACHE_ROOT", "HOME"} & set(environment)


# Secrets


@pytest.mark.parametrize(
    "own", [["--api-key", "s3cret"], ["--api_key=s3cret"]], ids=["word", "inline"]
)
def test_a_single_api_key_is_in_no_argv(own: list[str]) -> None:
    plan = decide(settings(*own, "--seed", "1"), FACTS)
    assert "s3cret" not in repr(plan)
    assert options(plan)["--seed"] == "1"


def test_several_api_keys_stay_and_are_hidden_when_shown() -> None:
    plan = decide(settings("--api-key", "s3cret1", "s3cret2"), FACTS)
    assert plan.attempts[0].argv[3:6] == ("--api-key", "s3cret1", "s3cret2")
    shown = plan.to_json()
    assert "s3cret" not in shown
    assert json.loads(shown)["attempts"][0]["argv"][3:6] == ["--api-key", "***", "***"]


def test_the_plan_as_json_is_whole() -> None:
    plan = decide(settings(), FACTS)
    assert set(json.loads(plan.to_json())) == {field.name for field in dataclasses.fields(Plan)}


# The engine's environment


def test_caches_lie_on_the_state_volume() -> None:
    environment = build_engine_environment(settings(), FACTS)
    folders = {
        *("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
        *("FLASHINFER_WORKSPACE_BASE", "XDG_CACHE_HOME"),
    }
    assert {name for name, value in environment.items() if FACTS.cache_dir in value} == folders
    assert len({environment[name] for name in folders}) == len(folders)
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert (environment["GLOO_SOCKET_IFNAME"], environment["VLLM_HOST_IP"]) == ("lo", "127.0.0.1")


@pytest.mark.parametrize(("device", "value"), [("cpu-12345678", "0"), ("cuda-90", None)])
def test_no_ahead_of_time_artifacts_on_a_cpu(device: str, value: str | None) -> None:
    environment = build_engine_environment(settings(), facts(device=device))
    assert environment.get("VLLM_USE_AOT_COMPILE") == value


@pytest.mark.parametrize(("uid", "home"), [("", False), ("0", False), ("1000", True)])
def test_another_uid_has_a_home_in_the_cache(uid: str, home: bool) -> None:
    plan = decide(settings(ENGINE_UID=uid), FACTS)
    assert plan.uid == (int(uid) if uid else None)
    assert plan.environment.get("HOME") == (f"{FACTS.cache_dir}/home" if home else None)


def test_no_setting_of_ours_reaches_the_engine() -> None:
    environment = build_engine_environment(
        settings(ENGINE_UID="1000", API_KEY="s3cret"), facts(cpu_quota=1.0)
    )
    ours = {name: value for name, value in environment.items() if name.startswith("WARMHOLD_")}
    assert ours == {"WARMHOLD_CONTROL_SOCKET": "/run/warmhold/engine/control.sock"}
    assert "s3cret" not in environment.values()


def test_decide_is_pure(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("VLLM_API_KEY", "HF_HUB_OFFLINE", "WARMHOLD_MODE", "WARMHOLD_MODEL"):
        monkeypatch.setenv(variable, "disk")
    assert decide(settings(), FACTS) == decide(settings(), FACTS)
    assert not hasattr(plan_module, "os")


# What snapshots are compared with


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Candidate]:
    """Every engine that was asked about; no machine is looked at."""
    seen: list[Candidate] = []

    def note(_: Settings, candidate: Candidate, *rest: Any) -> Snapshots:
        seen.append(candidate)
        return Snapshots()

    monkeypatch.setattr(start, "read_snapshots", note)
    return seen


def make_plan(monkeypatch: pytest.MonkeyPatch, found: Facts, **variables: str) -> None:
    monkeypatch.setattr(start, "read_facts", lambda _: found)
    for name, value in variables.items():
        monkeypatch.setenv(f"WARMHOLD_{name}", value)
    start.make_plan([])


@pytest.mark.parametrize(
    ("changes", "variables", "field"),
    [
        ({"cpu_quota": 2.0}, {}, "cpus"),
        ({"cpu_affinity": 4}, {}, "cpus"),
        ({"numa_nodes": 2}, {}, "cpus"),
        ({"memory_limit_bytes": 16 * GIB}, {}, "memory"),
        ({}, {"KV_CACHE_GIB": "1"}, "kv_cache_gib"),
        ({}, {"ENGINE_UID": "0"}, "uid"),
        ({"build_id": "b2"}, {}, "build"),
        ({"vllm_version": "0.33.0"}, {}, "vllm"),
    ],
)
def test_what_shapes_an_engine_is_told(
    seen: list[Candidate],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    variables: dict[str, str],
    field: str,
) -> None:
    make_plan(monkeypatch, FACTS)
    make_plan(monkeypatch, facts(**changes), **variables)
    before, after = (candidate.versions for candidate in seen)
    assert {name for name in after if before.get(name) != after[name]} == {field}


def test_what_is_installed_and_where_the_model_lies_is_told(
    seen: list[Candidate], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_plan(monkeypatch, facts(packages=("torch-2.9",)))
    assert (seen[0].packages, seen[0].model_directory) == (("torch-2.9",), "/opt/warmhold/demo")
    assert seen[0].argv[:3] == ("vllm", "serve", "/opt/warmhold/demo")
    assert seen[0].environment["HF_HUB_OFFLINE"] == "1"


# On a GPU

GPUS = Gpus("580.159.04", True, (Gpu("u1", 141 * GIB, "9.0", "NVIDIA H200"),))
GPU_FACTS = {"gpus": GPUS, "device": GPUS.device, "numa_nodes": 2, "vllm_version": "0.33.0"}
SLEEP = ("--enable-sleep-mode", "--sleep-mode-backend", "warmhold")


def gpu_plan(*command: str, **variables: str) -> Plan:
    quota = facts(**GPU_FACTS, cpu_quota=1.0)
    plan = decide(settings(*command, **variables), quota)
    assert plan.faults == ()
    return plan


def test_an_engine_on_a_gpu_has_our_sleep_mode_and_no_cpu_settings() -> None:
    plan = gpu_plan()
    argv = plan.attempts[0].argv
    place = argv.index(SLEEP[0])
    assert argv[place : place + 3] == SLEEP and argv[place + 3] == "--load-format"
    assert "--kv-cache-memory-bytes" not in argv and "--gpu-memory-utilization" not in argv
    assert plan.kv_cache_bytes is None
    assert not any(name.startswith("VLLM_CPU") for name in plan.environment)
    assert {"OMP_NUM_THREADS", "VLLM_USE_AOT_COMPILE"}.isdisjoint(plan.environment)
    assert plan.environment["NCCL_IB_DISABLE"] == "1"
    assert plan.loader["launch_key"]["cpu_linear"] == ""


def test_a_cpu_engine_has_none_of_it() -> None:
    plan = decide(settings(), FACTS)
    assert SLEEP[0] not in plan.attempts[0].argv and "NCCL_IB_DISABLE" not in plan.environment


@pytest.mark.parametrize(
    "command",
    [
        ("--no-enable-sleep-mode",),
        ("--enable-sleep-mode",),
        ("--sleep-mode-backend", "cumem"),
        ("--tensor-parallel-size", "2"),
        ("--load-format", "runai_streamer"),
    ],
)
def test_what_the_user_says_of_sleep_mode_stays(command: tuple[str, ...]) -> None:
    argv = gpu_plan(*command).attempts[0].argv
    assert argv.count("--sleep-mode-backend") == command.count("--sleep-mode-backend")
    assert "warmhold" not in argv[: argv.index("--shutdown-timeout")]


def test_several_workers_may_use_their_adapters() -> None:
    assert "NCCL_IB_DISABLE" not in gpu_plan("-tp", "2").environment
    kept = decide(read_settings({"NCCL_IB_DISABLE": "0"}, ())[0], facts(**GPU_FACTS)).environment
    assert "NCCL_IB_DISABLE" not in kept


def test_the_host_s_memory_is_no_limit_for_what_lies_on_a_gpu() -> None:
    large = Model("m", "/m", 500 * GIB)
    assert decide(settings(), facts(**GPU_FACTS, model=large)).faults == ()
    given = settings("--kv-cache-memory-bytes", "5")
    assert choose_kv_bytes(given, facts(**GPU_FACTS)) == (None, None)
    argv = decide(given, facts(**GPU_FACTS)).attempts[0].argv
    assert argv.count("--kv-cache-memory-bytes") == 1


def test_the_linear_path_of_cpus_is_no_part_of_a_gpu_s_key() -> None:
    keys = [gpu_plan(CPU_LINEAR=path).loader["launch_key"] for path in ("shared", "packed")]
    assert keys[0] == keys[1]
    assert "ipc_cache.memory" not in {
        item.code for item in gpu_plan(CPU_LINEAR="packed").rejections
    }


def test_the_gpus_are_told(seen: list[Candidate], monkeypatch: pytest.MonkeyPatch) -> None:
    make_plan(monkeypatch, facts(**GPU_FACTS))
    assert seen[0].gpus == GPUS and SLEEP[0] in seen[0].argv


# Upstream's holder

TWO = Gpus("580", True, (*GPUS.all, Gpu("u2", 141 * GIB, "9.0", "NVIDIA H200")))
TWO_FACTS = {**GPU_FACTS, "gpus": TWO, "vault": Vault("off", "")}


def held_plan(*command: str, **variables: str) -> Plan:
    wanted = settings(*command, **{"WCACHE": "vllm", **variables})
    return decide(wanted, facts(**TWO_FACTS))


def test_what_the_holder_holds_is_mapped_or_read_from_disk_and_nothing_else() -> None:
    plan = held_plan("-tp", "2", "--load-format", "safetensors")
    assert [attempt.mode for attempt in plan.attempts] == ["ipc_cache", "disk"]
    assert (plan.backend, plan.loader, plan.faults) == ("vllm", {}, ())
    ipc, disk = (attempt.argv for attempt in plan.attempts)
    extra = {"fallback": False, "socket_dir": "/run/warmhold/holder"}
    assert ipc[-4:-1] == ("--load-format", "ipc_cache", "--model-loader-extra-config")
    assert json.loads(ipc[-1]) == extra
    assert disk[-2:] == ("--load-format", "safetensors") and "warmhold" not in disk
    assert not set(SLEEP) & set(ipc)
    assert plan.launch_key["argument.tensor-parallel-size"] == "2"
    assert held_plan().backend == "vllm" and not set(SLEEP) & set(held_plan().attempts[0].argv)


def test_the_users_own_ipc_cache_is_the_holders() -> None:
    plan = held_plan("--load-format", "ipc_cache")
    assert [attempt.mode for attempt in plan.attempts] == ["ipc_cache", "disk"]
    assert "ipc_cache" not in plan.attempts[1].argv


def test_where_the_holder_cannot_be_used_there_is_the_disk_or_a_fault() -> None:
    wanted = settings(WCACHE="vllm")
    plan = decide(wanted, FACTS)
    assert [attempt.mode for attempt in plan.attempts] == ["disk"]
    assert plan.rejections[1].code == "ipc_cache.unsupported"
    plan = decide(settings(WCACHE="vllm", MODE="ipc_cache"), facts(rocm=True))
    assert codes(plan) == ["mode.unavailable"] and "ROCm" in plan.faults[0].detail


@pytest.mark.parametrize("backend", ["auto", "vault", "off"])
def test_one_gpu_is_the_vaults(backend: str) -> None:
    plan = held_plan(WCACHE=backend)
    assert plan.backend == ("off" if backend == "off" else "vault")
    assert plan.loader["publish"] == (backend != "off")


def test_what_has_to_be_free_on_the_gpus_of_the_engine_alone() -> None:
    share = ("--gpu-memory-utilization", "0.5")
    size = int(141 * GIB * 0.5)
    assert held_plan(*share).memory.by_uuid == {"u1": size}
    assert held_plan("-tp", "2", *share).memory.by_uuid == {"u1": size, "u2": size}
    assert decide(settings(), FACTS).memory.by_uuid == {}
    wanted = settings(*share)
    on_gpu = facts(**GPU_FACTS)
    row = {"id": "g1", "model": "m", "bytes": 3 * GIB}
    row["launch_key"] = dict(decide(wanted, on_gpu).launch_key)
    vault = Vault(rows=(row,))  # asked again when the engine starts
    assert decide(wanted, dataclasses.replace(on_gpu, vault=vault)).memory.by_uuid == {"u1": size}
