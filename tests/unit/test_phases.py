# SPDX-License-Identifier: Apache-2.0
"""Phases of a start, cut from lines that vLLM 0.32 wrote on a CPU (recorded, shortened)."""

import itertools
import os
import subprocess
import sys
import time

import pytest
from warmhold_entrypoint.running.phases import Gap, PhaseClock, Phases, own_age_s

# Seconds since the first line, and the line. From a start with an empty compile cache.
COMPILED = [
    (0.0, "Triton is installed, but doesn't include CPU backend. Disabling Triton."),
    (9.2, "(APIServer pid=1) INFO 11-30 00:13:46 [api_utils.py:286] non-default args: {'model'"),
    (20.0, "(APIServer pid=1) INFO 11-30 00:13:57 [model.py:733] Resolved architecture: Llama"),
    (28.0, "(EngineCore pid=229) INFO [core.py:133] Initializing a V1 LLM engine (v0.32.0) with"),
    (36.0, "(Worker pid=311) INFO [cpu_model_runner.py:68] Starting to load model /m..."),
    (36.3, "(Worker pid=311) INFO [base_loader.py:82] Initializing model took 0.281775 seconds"),
    (36.4, "Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00,  1.12it/s]"),
    (37.2, "(Worker pid=311) INFO [default_loader.py:501] Loading weights took 0.90 seconds"),
    (115.0, "(Worker pid=311) INFO [decorators.py:743] [backbone] saved AOT compiled function"),
    (
        124.5,
        "(EngineCore pid=229) INFO [core.py:402] init engine (profile, create kv cache, warmup"
        " model) took 85.93 s",
    ),
    (127.1, "(APIServer pid=1) INFO [entry.py:140] Starting vLLM server on http://0.0.0.0:8000"),
    (127.7, "INFO:     Application startup complete."),
]  # fmt: skip
# The same with --enforce-eager: no compilation.
EAGER = [
    (0.0, "Triton is installed, but doesn't include CPU backend. Disabling Triton."),
    (9.0, "(APIServer pid=1) INFO 11-30 00:15:57 [api_utils.py:286] non-default args: {'model'"),
    (18.7, "(APIServer pid=1) WARNING [vllm.py:1703] Enforce eager set, disabling torch"),
    (38.2, "(Worker pid=309) INFO [cpu_model_runner.py:68] Starting to load model /m..."),
    (38.7, "(Worker pid=309) INFO [default_loader.py:501] Loading weights took 0.26 seconds"),
    (
        41.5,
        "(EngineCore pid=212) INFO [core.py:402] init engine (profile, create kv cache, warmup"
        " model) took 1.79 s",
    ),
    (42.8, "(EngineCore pid=212) WARNING [vllm.py:1703] Enforce eager set, disabling torch"),
    (44.0, "INFO:     Application startup complete."),
]  # fmt: skip
OURS = "(Worker pid=628) INFO 11-30 04:31:18 [loader.py:108] weights mode="
LISTENING_S, FIRST_TOKEN_S = 130.0, 131.5


class FakeTime:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_to(self, seconds: float) -> None:
        self.now = 1000.0 + seconds


def replay(lines: list[tuple[float, str]]) -> tuple[Phases, list[str]]:
    """Given timed lines, return the phases and the names of those that were under way in turn."""
    now = FakeTime()
    clock = PhaseClock(now)
    under_way = [clock.current]
    for seconds, line in lines:
        now.pass_to(seconds)
        clock.see_line(line.encode())
        under_way.append(clock.current)
    now.pass_to(LISTENING_S)
    clock.see_listening()
    now.pass_to(FIRST_TOKEN_S)
    return clock.finish(), [name for name, _ in itertools.groupby(under_way)]


def assert_seconds(phases: Phases, **seconds: float) -> None:
    assert phases.seconds == pytest.approx({"image": 0.0, **seconds})
    assert list(phases.seconds) == ["image", *seconds]
    assert phases.total_s == pytest.approx(FIRST_TOKEN_S)
    assert sum(phases.seconds.values()) + phases.unaccounted_s == pytest.approx(phases.total_s)


def test_a_start_that_compiles() -> None:
    phases, under_way = replay(COMPILED)
    assert_seconds(
        phases,
        imports=9.2,
        engine_init=26.8,
        weights=1.2,
        compile=77.8,
        warmup=9.5,
        api=5.5,
        first_token=1.5,
    )
    assert under_way == [
        *("imports", "engine_init", "weights", "compile", "warmup", "api"),
    ]


def test_an_eager_start_has_no_compile_phase() -> None:
    phases, _ = replay(EAGER)
    assert_seconds(
        phases,
        imports=9.0,
        engine_init=29.2,
        weights=0.5,
        warmup=2.8,
        api=88.5,
        first_token=1.5,
    )


def test_publishing_belongs_to_the_weights() -> None:
    lines = [*EAGER[:5], (40.7, f"{OURS}disk bytes=1 content_s=0.163"), *EAGER[5:]]
    phases, _ = replay(lines)
    assert phases.seconds["weights"] == pytest.approx(2.5)
    assert phases.seconds["warmup"] == pytest.approx(0.8)


def test_a_hit_has_a_weight_phase() -> None:
    lines = [*EAGER[:4], (38.3, f"{OURS}ipc_cache bytes=1 fetch_s=0.02"), *EAGER[5:]]
    phases, _ = replay(lines)
    assert phases.seconds["weights"] == pytest.approx(0.1)
    assert phases.unaccounted_s == pytest.approx(0.0)


@pytest.mark.parametrize(
    "line",
    [
        "INFO [decorators.py:305] Directly load AOT compilation from path /root/.cache/vllm",
        "INFO [monitor.py:53] torch.compile took 0.5 s in total",
        "(Worker pid=311) INFO [cpu_model_runner.py:93] Warming up done.",
    ],
)
def test_a_warm_compile_cache_ends_the_phase_too(line: str) -> None:
    lines = [item if "saved AOT" not in item[1] else (item[0], line) for item in COMPILED]
    assert replay(lines)[0] == replay(COMPILED)[0]


def test_several_workers_lines_count_once() -> None:
    doubled = [item for item in COMPILED for _ in range(2)]
    assert replay(doubled) == replay(COMPILED)


@pytest.mark.parametrize(
    ("gone", "unaccounted_s"),
    [("non-default args", 36.0), ("Starting to load", 28.0), ("init engine", 15.0)],
)
def test_the_time_of_a_line_that_never_comes_is_unaccounted(
    gone: str, unaccounted_s: float
) -> None:
    phases, _ = replay([item for item in COMPILED if gone not in item[1]])
    assert phases.unaccounted_s == pytest.approx(unaccounted_s)
    assert all(seconds >= 0 for seconds in phases.seconds.values())


def test_a_silent_engine_is_unaccounted() -> None:
    phases, _ = replay([])
    assert phases.unaccounted_s == pytest.approx(LISTENING_S)
    assert_seconds(phases, first_token=1.5)


def test_what_no_phase_explains() -> None:
    assert Phases({"imports": 1.0, "weights": 2.0}, 5.0).unaccounted_s == 2.0


def test_what_comes_before_an_attempt_belongs_to_the_start() -> None:
    gap = Gap(time.monotonic() - 5.0)
    gap.begin(time.monotonic())  # it has begun long ago
    gap.close("plan")
    gap.close("failed_attempt")
    found = gap.end(Phases({"imports": 2.0, "first_token": 1.0}, 4.0))
    assert list(found.seconds) == ["plan", "failed_attempt", "imports", "first_token"]
    assert 5.0 <= found.seconds["plan"] < 60.0
    assert found.unaccounted_s == pytest.approx(1.0)


def test_between_two_gaps_an_engine_serves() -> None:
    gap = Gap(time.monotonic())
    gap.end(Phases({}, 0.0))
    gap.close("stop")  # serving is no phase
    gap.begin(time.monotonic() - 2.0)
    gap.close("stop")
    found = gap.end(Phases({}, 0.0))
    assert list(found.seconds) == ["stop"] and 2.0 <= found.total_s < 60.0


def test_the_age_of_a_process() -> None:
    code = (
        "import time; time.sleep(0.3); from warmhold_entrypoint.running.phases import own_age_s;"
        " print(own_age_s())"
    )
    path = os.pathsep.join(sys.path)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert 0.29 <= float(done.stdout) <= time.monotonic() - began + 0.02
    assert own_age_s() > 0
