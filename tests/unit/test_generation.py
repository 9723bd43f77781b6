# SPDX-License-Identifier: Apache-2.0
"""Generations: their identity, their way through JSON, and everything that is none."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from vault_process import close_all, make_generation
from warmhold_wcache.errors import WcacheError
from warmhold_wcache.generation import (
    MAX_KEY_BYTES,
    Generation,
    differences,
    encode_description,
    key_id,
)
from warmhold_wcache.protocol import decode

Json = dict[str, Any]


def sample() -> Json:
    generation, fds = make_generation()
    close_all(fds)
    value: Json = json.loads(encode_description(generation))
    return value


def test_a_generation_survives_json() -> None:
    generation, fds = make_generation()
    close_all(fds)
    back = Generation.from_json(decode(encode_description(generation)))
    assert back == generation
    assert back.id == generation.id
    assert back.size_bytes == 3 * 4096


def test_the_id_follows_from_the_key_alone_and_never_changes() -> None:
    assert key_id({"b": "2", "a": "1"}) == key_id({"a": "1", "b": "2"}) == "21f76dfbfe6dfe21"
    assert key_id({"a": "1"}) != key_id({"a": "2"})


def test_differences_name_every_field() -> None:
    assert differences({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "x", "d": "4"}) == {
        "b": ("2", "x"),
        "c": ("3", ""),
        "d": ("", "4"),
    }


WRONG: dict[str, Callable[[Json], object]] = {
    "no key": lambda v: v.pop("key"),
    "empty key": lambda v: v.update(key={}),
    "key of numbers": lambda v: v.update(key={"a": 1}),
    "key too long": lambda v: v.update(key={"a": "x" * MAX_KEY_BYTES}),
    "launch key too long": lambda v: v.update(launch_key={"a": "x" * MAX_KEY_BYTES}),
    "model too long": lambda v: v.update(model="m" * (9 << 10)),
    "model too long in JSON": lambda v: v.update(model="\ud800" * (2 << 10)),
    "backend": lambda v: v.update(backend="pickle"),
    "device": lambda v: v.update(device=None),
    "no segments": lambda v: v.update(segments=[], tensors=[], aliases={}),
    "too many segments": lambda v: v.update(segments=v["segments"] * 2000),
    "segment is text": lambda v: v["segments"].append("x"),
    "negative size": lambda v: v["segments"][0].update(size_bytes=-1),
    "zero size": lambda v: v["segments"][2].update(size_bytes=0),
    "boolean size": lambda v: v["segments"][0].update(size_bytes=True),
    "float size": lambda v: v["segments"][0].update(size_bytes=4096.0),
    "huge size": lambda v: v["segments"][0].update(size_bytes=1 << 70),
    "checksum": lambda v: v["segments"][0].update(checksum=None),
    "long checksum": lambda v: v["segments"][0].update(checksum="0" * 129),
    "tensors are no list": lambda v: v.update(tensors={}),
    "nameless tensor": lambda v: v["tensors"][1].update(name=""),
    "kind": lambda v: v["tensors"][0].update(kind="weight"),
    "segment beyond": lambda v: v["tensors"][0].update(segment=3),
    "negative segment": lambda v: v["tensors"][0].update(segment=-1),
    "offset beyond": lambda v: v["tensors"][0].update(offset_bytes=4),
    "offset far beyond": lambda v: v["tensors"][0].update(offset_bytes=1 << 61),
    "shape beyond": lambda v: v["tensors"][0].update(shape=[33, 32]),
    "stride beyond": lambda v: v["tensors"][0].update(stride=[33, 1]),
    "negative stride": lambda v: v["tensors"][0].update(stride=[-32, 1]),
    "rank": lambda v: v["tensors"][0].update(stride=[1]),
    "long shape": lambda v: v["tensors"][0].update(shape=[1] * 65, stride=[1] * 65),
    "dtype": lambda v: v["tensors"][0].update(dtype=None),
    "two of one name": lambda v: v["tensors"].append(v["tensors"][0]),
    "alias of nothing": lambda v: v.update(aliases={"tied": "nothing"}),
    "alias over a tensor": lambda v: v.update(aliases={"w1": "w0"}),
    "alias to a list": lambda v: v.update(aliases={"tied": ["w0"]}),
    "attributes": lambda v: v.update(attributes=[]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused(name: str) -> None:
    value = sample()
    WRONG[name](value)
    with pytest.raises(WcacheError) as caught:
        Generation.from_json(value)
    assert caught.value.code in ("wcache.malformed", "wcache.too-large")


@pytest.mark.parametrize("value", [None, [], "x", 1, {}, {"key": None}])
def test_what_is_no_object_is_refused(value: object) -> None:
    with pytest.raises(WcacheError, match=r"wcache\.malformed"):
        Generation.from_json(value)


@pytest.mark.parametrize(
    "change", [{"shape": [0, 1 << 60]}, {"dtype": "strange", "stride": [9, 9]}]
)
def test_empty_and_unknown_tensors_need_no_room(change: Json) -> None:
    value = sample()
    value["tensors"][0].update(change)
    assert Generation.from_json(value).tensors[0].name == "w0"


@pytest.mark.parametrize("attribute", [float("nan"), float("inf"), {1, 2}, b"x"])
def test_attributes_are_json(attribute: object) -> None:
    generation, fds = make_generation()
    close_all(fds)
    generation.attributes["bad"] = attribute
    with pytest.raises(WcacheError, match=r"wcache\.malformed"):
        encode_description(generation)
