# SPDX-License-Identifier: Apache-2.0
"""A benchmark's rows, proofs and pictures: a row that did not prove itself is no time anywhere."""

import dataclasses
import io
import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import msgspec
import pytest
from rich.console import Console
from warmhold_entrypoint.bench import page_cache
from warmhold_entrypoint.bench.chart import build_footer, write_chart
from warmhold_entrypoint.bench.command import read_result
from warmhold_entrypoint.bench.proof import Evidence, find_faults
from warmhold_entrypoint.bench.result import (
    UNACCOUNTED,
    Result,
    Snapshot,
    Start,
    complete,
    summarise,
)
from warmhold_entrypoint.bench.run import check_modes
from warmhold_entrypoint.bench.scaling import Image, Line, Scaling, build, draw, fit
from warmhold_entrypoint.bench.table import print_table

BENCH = Path(__file__).parents[2] / "bench"
RESULTS = sorted((BENCH / "results").glob("bench*.json"))
SCALINGS = sorted((BENCH / "results").glob("scaling*.json"))


def start(name: str, seconds: float | None, *faults: str, index: int = 0) -> Start:
    phases = complete({"image": 0.0, "imports": 0.5, "weights": 0.25}, seconds or 0.0)
    proof = {"weights_s": 0.01 * len(name)}
    return Start(name, index, seconds, seconds, phases if seconds else {}, proof, list(faults))


def result_of(*starts: Start, weight_bytes: int = 10**9) -> Result:
    return Result(
        date="2026-11-30T10:00:00+00:00",
        command="warmhold bench --rounds 3",
        versions={"vllm": "0.32.0", "warmhold": "1", "kernel": "6.18"},
        machine={"cpus": "2", "cpu": "Some CPU", "memory_gib": "24.0", "gpus": "none"},
        model="demo",
        weight_bytes=weight_bytes,
        arguments=[],
        page_cache="as it was",
        starts=list(starts),
        rows=summarise(starts),
        snapshot=Snapshot(1.5, 1.25, 10**9),
    )


MEASURED = result_of(
    *(start("disk", 40.0 + index, index=index) for index in (2, 0, 1)),
    start("ipc_cache", 38.0),
    start("snapshot", 1.25, index=0),
    start("snapshot", None, "it is no restore", index=1),
    start("vllm serve", None, "it never served"),
)


# Rows


def test_a_median_is_one_start_and_its_phases_add_up_to_it() -> None:
    disk, hit, restored, peer = MEASURED.rows
    assert (disk.median_s, disk.best_s, disk.worst_s, disk.speedup) == (41.0, 40.0, 42.0, 1.0)
    assert (disk.count, disk.failed, hit.median_s) == (3, 0, 38.0)
    assert restored.speedup == pytest.approx(41.0 / 1.25)
    for row in (disk, hit, restored):
        assert sum(row.phases.values()) == pytest.approx(row.median_s)
        assert "image" not in row.phases, "what took no time is no phase"
    assert (peer.median_s, peer.speedup, peer.phases) == (None, None, {})


def test_a_start_with_a_fault_has_no_time() -> None:
    restored = MEASURED.rows[2]
    assert (restored.count, restored.failed) == (2, 1)
    assert restored.faults == ["it is no restore"]
    assert (restored.best_s, restored.worst_s) == (1.25, 1.25)


def test_an_even_number_of_starts_has_the_lower_median() -> None:
    (row,) = summarise([start("disk", 2.0), start("disk", 4.0)])
    assert row.median_s == 2.0


def test_without_a_baseline_there_is_no_ratio() -> None:
    (row,) = summarise([start("snapshot", 2.0)])
    assert row.speedup is None


def test_what_is_left_over_is_unaccounted() -> None:
    assert complete({"a": 1.0, "b": 0.0, UNACCOUNTED: 7.0}, 3.0) == {"a": 1.0, UNACCOUNTED: 2.0}


def test_a_token_that_came_before_the_runners_own_ends_the_phases() -> None:
    found = complete({"image": 1.0, "canary": 1.5, "first_token": 1.0}, 2.0)
    assert found == {"image": 1.0, "canary": 1.0, UNACCOUNTED: 0.0}


@pytest.mark.parametrize(
    ("modes", "said"), [(("disk", "fast"), "no mode: fast"), (("snapshot",), "disk has to be")]
)
def test_modes_that_cannot_be_measured(modes: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_modes(modes)
    check_modes(("disk",))


# Proofs

HIT = Evidence(
    wanted="ipc_cache",
    mode="ipc_cache",
    weights={"mode": "ipc_cache", "bytes": 10, "seconds": 0.1},
    weight_bytes=10**9,
    answers=["a", "b"],
    known_answers=["a", "b"],
    nonce="new",
    nonces_before=frozenset({"old"}),
    snapshot_nonce="saved",
    cached_before_bytes=0,
    cached_after_bytes=4096,
)
DISK = dataclasses.replace(HIT, wanted="disk", mode="disk", weights={"mode": "disk", "bytes": 10})
RESTORED = dataclasses.replace(HIT, wanted="snapshot", mode="snapshot", nonce="saved")


@pytest.mark.parametrize("seen", [HIT, DISK, RESTORED], ids=lambda seen: seen.wanted)
def test_what_proves_itself(seen: Evidence) -> None:
    assert find_faults(seen) == []
    assert seen.to_json()["answers_equal"] is True


@pytest.mark.parametrize(
    ("seen", "changes", "said"),
    [
        (HIT, {"mode": "disk"}, "the runner says mode disk"),
        (HIT, {"answers": ["a", "c"]}, "answers"),
        (HIT, {"nonce": "old"}, "no new process"),
        (HIT, {"nonce": ""}, "no new process"),
        (HIT, {"weights": {"mode": "disk"}}, "not out of the vault"),
        (HIT, {"weights": {}}, "nowhere"),
        (HIT, {"cached_after_bytes": 10**9}, "it read 1000000000 bytes"),
        (HIT, {"cached_before_bytes": None}, "not known"),
        (DISK, {"weights": {"mode": "ipc_cache", "bytes": 10}}, "read no weights from disk"),
        (DISK, {"weights": {"mode": "disk", "bytes": 0}}, "read no weights from disk"),
        (DISK, {"nonce": "old"}, "no new process"),
        (RESTORED, {"nonce": "new"}, "not the process that the snapshot was made of"),
        (RESTORED, {"nonce": "", "snapshot_nonce": ""}, "not the process"),
        (RESTORED, {"weights": {"mode": "flat"}}, "from flat"),
        (RESTORED, {"cached_after_bytes": 10**9}, "it read"),
    ],
)
def test_what_does_not(seen: Evidence, changes: dict[str, Any], said: str) -> None:
    (fault,) = find_faults(dataclasses.replace(seen, **changes))
    assert said in fault


# The page cache


def test_what_was_read_of_a_file_is_known_to_the_kernel(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(64 << 20))
    with path.open("rb+") as file:
        import os

        os.fsync(file.fileno())
    page_cache.drop([path])
    assert page_cache.resident_bytes([path]) == 0, "a file system that keeps its pages"
    with path.open("rb") as file:
        file.read(4096)
    assert 4096 <= page_cache.resident_bytes([path]) < 16 << 20
    page_cache.fill([path])
    assert page_cache.resident_bytes([path]) == 64 << 20


def test_an_empty_file_has_no_pages(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert page_cache.resident_bytes([tmp_path / "empty"]) == 0


# What is shown


def table_of(result: Result) -> str:
    console = Console(file=io.StringIO(), width=200, highlight=False)
    print_table(result, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def texts_of(svg: Path) -> list[str]:
    tree = ElementTree.parse(svg)  # noqa: S314 - our own file
    return ["".join(node.itertext()).strip() for node in tree.iter() if node.tag.endswith("}text")]


@pytest.mark.parametrize(
    "result", [MEASURED, *map(read_result, RESULTS)], ids=["made", *(p.name for p in RESULTS)]
)
def test_table_picture_and_json_agree(result: Result, tmp_path: Path) -> None:
    again = msgspec.json.decode(msgspec.json.encode(result), type=Result)
    assert again.rows == summarise(again.starts), "rows are made of the starts, and of nothing else"
    svg, png = write_chart(again, tmp_path)
    texts, table = texts_of(svg), table_of(again)
    for row in again.rows:
        (line,) = (text for text in table.splitlines() if text.startswith(f"│ {row.name} "))
        if row.median_s is None:
            assert "failed" in line and not re.search(r"\d\.\d", line)
            assert f"not counted: {row.name}: {row.faults[0]}" in table
            assert any(text.startswith(f"not counted: {row.faults[0][:40]}") for text in texts)
            continue
        shown = f"{row.median_s:.2f} s"
        assert shown in line
        assert any(text.startswith(shown) for text in texts)
        if row.speedup:
            assert f" {row.speedup:.1f} " in line
        if row.speedup and row.speedup > 1.0:
            assert any(text.startswith(f"{shown}, {row.speedup:.1f}") for text in texts)
    assert all(line in texts for line in build_footer(again).splitlines())
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_committed_pictures_are_those_of_the_result_beside_them(path: Path) -> None:
    texts = texts_of(path.with_suffix(".svg"))
    for row in read_result(path).rows:
        assert row.name in texts
        assert any(text.startswith(f"{row.median_s:.2f} s") for text in texts)


def test_a_picture_is_the_same_each_time(tmp_path: Path) -> None:
    first = write_chart(MEASURED, tmp_path)[0].read_bytes()
    assert write_chart(MEASURED, tmp_path)[0].read_bytes() == first


def test_phases_are_named_and_no_two_look_alike(tmp_path: Path) -> None:
    from warmhold_entrypoint.bench.chart import COLOURS

    assert len(set(COLOURS.values())) == len(COLOURS)
    texts = texts_of(write_chart(MEASURED, tmp_path)[0])
    assert {"imports", "weights", "unaccounted"} <= set(texts)


# How it grows


def image(megabytes: int) -> Image:
    seconds = megabytes / 1000
    return Image(
        megabytes * 10**6, 0.1 + seconds, 0.0, 0.0, 0.1 + 2 * seconds, seconds / 4, seconds
    )


def sized(gigabytes: int) -> Result:
    names = ("disk", "ipc_cache", "snapshot")
    starts = [start(name, 10.0 * gigabytes) for name in names]
    return result_of(*starts, weight_bytes=gigabytes * 10**9)


def test_lines_are_those_of_the_points() -> None:
    made = build([sized(2), sized(1)], [image(100), image(400), image(1600)])
    assert [size.weight_bytes for size in made.sizes] == [10**9, 2 * 10**9]
    assert made.lines["restore_s"].slope_s_per_gb == pytest.approx(10.0)
    assert made.lines["cold_s"].slope_s_per_gb == pytest.approx(2.0)
    assert made.lines["warm_s"].intercept_s == pytest.approx(0.1)
    assert fit([(0, 1.0), (10**9, 3.0)]) == Line(2.0, 1.0)
    assert draw(made).axes[0].get_legend() is not None


def test_a_size_that_proved_nothing_has_no_point() -> None:
    failed = result_of(start("disk", 1.0), start("ipc_cache", 1.0), start("snapshot", None, "no"))
    with pytest.raises(ValueError, match="no start snapshot that proved itself"):
        build([failed, sized(1)], [image(100), image(400)])


# The schema


def test_the_schema_is_the_types_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import make_schema

    assert (BENCH / "schema.json").read_text() == make_schema.build()
    sys.modules.pop("make_schema")


@pytest.mark.parametrize("path", [*RESULTS, *SCALINGS], ids=lambda path: path.name)
def test_committed_results_are_valid(path: Path) -> None:
    schema = json.loads((BENCH / "schema.json").read_text())
    jsonschema.validate(json.loads(path.read_text()), schema[re.split(r"\W", path.stem)[0]])


@pytest.mark.parametrize("wrong", [{"format": 2}, {"starts": "none"}, {"extra": 1}, {"date": None}])
def test_the_schema_refuses_what_is_none(wrong: dict[str, Any]) -> None:
    schema = json.loads((BENCH / "schema.json").read_text())["bench"]
    sound = msgspec.to_builtins(MEASURED)
    jsonschema.validate(sound, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**sound, **wrong}, schema)


def test_a_scaling_fits_its_schema() -> None:
    made: Scaling = build([sized(1), sized(2)], [image(100), image(400)])
    schema = json.loads((BENCH / "schema.json").read_text())["scaling"]
    jsonschema.validate(msgspec.to_builtins(made), schema)
