# SPDX-License-Identifier: Apache-2.0
"""One published set of weights: its key, its segments, and the tensors in them.

A description is JSON in a sealed memfd, so it travels and is kept like the segments themselves.
Whatever is read from one is checked here: no tensor reaches beyond its segment.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from .errors import WcacheError, malformed
from .protocol import MAX_FDS, decode

BACKENDS = ("memfd", "cuda-vmm")
KINDS = ("parameter", "buffer")
MAX_KEY_BYTES = 48 << 10  # so that a request with it fits
MAX_DESCRIPTION_BYTES = 16 << 20
_MAX_NAME_BYTES = 8 << 10  # of a model, in JSON: with the keys all fit into one answer
_MAX_TENSORS = 200_000
_MAX_INT = 1 << 62
# What a key says of the checkpoint itself. Every other field is a choice of the one who serves it
# (a rank, a type, a linear path), and two choices may well be wanted side by side.
_CHECKPOINT_FIELDS = frozenset(("content", "checkpoint", "hf_config_hash", "revision"))
# Bytes of an element; of a type that is not listed only the offset is checked.
_ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
}


@dataclass(frozen=True)
class Segment:
    """One shared allocation; `checksum` is hexadecimal, empty where it was not computed."""

    size_bytes: int
    address: int
    checksum: str


@dataclass(frozen=True)
class Tensor:
    """A tensor in a segment; stride in elements, dtype as torch prints it without `torch.`."""

    name: str
    kind: str
    segment: int
    offset_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Generation:
    """A whole set of weights; generations with equal keys are the same."""

    key: dict[str, str]
    launch_key: dict[str, str]
    backend: str
    device: str
    model: str
    segments: tuple[Segment, ...]
    tensors: tuple[Tensor, ...]
    aliases: dict[str, str]
    attributes: dict[str, Any]

    @cached_property
    def id(self) -> str:
        """The generation's short name, which follows from its key."""
        return key_id(self.key)

    @property
    def size_bytes(self) -> int:
        """The bytes of all segments."""
        return sum(segment.size_bytes for segment in self.segments)

    def to_json(self) -> dict[str, Any]:
        """Return the generation as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> "Generation":
        """Given JSON values, return the generation; raise WcacheError on anything malformed."""
        made = cls(
            key=_texts(_get(value, "key", dict), "key"),
            launch_key=_texts(_get(value, "launch_key", dict), "launch_key"),
            backend=_get(value, "backend", str),
            device=_get(value, "device", str),
            model=_get(value, "model", str),
            segments=tuple(map(_segment, _get(value, "segments", list))),
            tensors=tuple(map(_tensor, _get(value, "tensors", list))),
            aliases=_texts(_get(value, "aliases", dict), "aliases"),
            attributes=_get(value, "attributes", dict),
        )
        _check(made)
        return made


def key_id(key: Mapping[str, str]) -> str:
    """Given a key, return the id: 16 hexadecimal digits of its canonical JSON's SHA-256."""
    return hashlib.sha256(_canonical(key)).hexdigest()[:16]


def differences(resident: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, Any]:
    """Given two keys, return what differs, name -> (resident, wanted); absent reads as empty."""
    return {
        name: (resident.get(name, ""), wanted.get(name, ""))
        for name in sorted(resident.keys() | wanted.keys())
        if resident.get(name) != wanted.get(name)
    }


def is_superseded(old: Mapping[str, str], new: Mapping[str, str], same_model: bool) -> bool:
    """Given two exact keys and whether they are of one model's name, tell whether the new one is of
    a checkpoint that has changed since the old one, in the same layout."""
    differing = differences(old, new).keys()
    known = old.get("content") and new.get("content")
    changed = known and "content" in differing and differing <= _CHECKPOINT_FIELDS
    return bool(same_model and changed)


def encode_description(generation: Generation) -> bytes:
    """Given a generation, return its description; raise WcacheError where it is none."""
    try:
        text = json.dumps(generation.to_json(), separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise malformed(f"attributes are not JSON: {error}") from None
    description = text.encode()
    Generation.from_json(decode(description))
    return description


def read_description(fd: int) -> Generation:
    """Given a descriptor of a description, return the generation; raise WcacheError for others."""
    size = os.fstat(fd).st_size
    if not 0 < size <= MAX_DESCRIPTION_BYTES:
        raise WcacheError("wcache.too-large", f"a description of {size} bytes")
    content = bytearray()
    while chunk := os.pread(fd, min(size, 1 << 20), len(content)):
        content += chunk
    return Generation.from_json(decode(content))


def _canonical(key: Mapping[str, str]) -> bytes:
    return json.dumps(dict(key), sort_keys=True, separators=(",", ":")).encode()


def _check(made: Generation) -> None:
    if not made.key or made.backend not in BACKENDS:
        raise malformed(f"a key of {len(made.key)} fields, backend {made.backend!r}")
    if max(len(_canonical(made.key)), len(_canonical(made.launch_key))) > MAX_KEY_BYTES:
        raise WcacheError("wcache.too-large", f"a key of more than {MAX_KEY_BYTES} bytes")
    if len(json.dumps(made.model)) > _MAX_NAME_BYTES:
        raise WcacheError("wcache.too-large", f"a model's name of {len(made.model)} letters")
    if not 0 < len(made.segments) < MAX_FDS or len(made.tensors) > _MAX_TENSORS:
        raise WcacheError(
            "wcache.too-large", f"{len(made.segments)} segments, {len(made.tensors)} tensors"
        )
    names = {tensor.name for tensor in made.tensors}
    if len(names) != len(made.tensors):
        raise malformed("two tensors of one name")
    for name, target in made.aliases.items():
        if target not in names or name in names:
            raise malformed(f"alias {name!r} of {target!r}")
    for tensor in made.tensors:
        if tensor.segment >= len(made.segments):
            raise malformed(f"tensor {tensor.name!r} in segment {tensor.segment}")
        size = made.segments[tensor.segment].size_bytes
        if tensor.offset_bytes + _extent_bytes(tensor) > size:
            raise malformed(f"tensor {tensor.name!r} reaches beyond its segment")


def _extent_bytes(tensor: Tensor) -> int:
    """How many bytes the tensor spans from its offset on."""
    if 0 in tensor.shape:
        return 0
    steps = zip(tensor.shape, tensor.stride, strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps)
    return elements * _ITEM_BYTES.get(tensor.dtype, 0)


def _segment(value: object) -> Segment:
    made = Segment(_int(value, "size_bytes"), _int(value, "address"), _get(value, "checksum", str))
    if made.size_bytes == 0 or len(made.checksum) > 128:
        raise malformed("an empty segment, or a checksum that is none")
    return made


def _tensor(value: object) -> Tensor:
    made = Tensor(
        name=_get(value, "name", str),
        kind=_get(value, "kind", str),
        segment=_int(value, "segment"),
        offset_bytes=_int(value, "offset_bytes"),
        shape=_ints(value, "shape"),
        stride=_ints(value, "stride"),
        dtype=_get(value, "dtype", str),
    )
    if made.kind not in KINDS or len(made.shape) != len(made.stride) or not made.name:
        raise malformed(f"tensor {made.name!r} of kind {made.kind!r}, shape {made.shape}")
    return made


def _get(value: object, name: str, kind: type) -> Any:
    found = value.get(name) if isinstance(value, dict) else None
    if type(found) is not kind:
        raise malformed(f"{name} is missing or not of type {kind.__name__}")
    return found


def _int(value: object, name: str) -> int:
    found: int = _get(value, name, int)
    if not 0 <= found < _MAX_INT:
        raise malformed(f"{name}={found if abs(found) < _MAX_INT else 'huge'}")
    return found


def _ints(value: object, name: str) -> tuple[int, ...]:
    found = _get(value, name, list)
    if len(found) > 64 or any(type(item) is not int or not 0 <= item < _MAX_INT for item in found):
        raise malformed(f"{name} is not a short list of natural numbers")
    return tuple(found)


def _texts(value: dict[str, Any], name: str) -> dict[str, str]:
    if any(type(item) is not str for item in value.values()):
        raise malformed(f"{name} holds values that are not text")
    return value
