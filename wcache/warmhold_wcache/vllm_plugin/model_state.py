# SPDX-License-Identifier: Apache-2.0
"""A model's tensors as a generation, and a generation's tensors as a model.

Owns the walk over modules: which tensors there are, which names are the same tensor, which plain
attributes loading set, and the way back. Knows nothing of vaults, memory or files.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

PARAMETER = "parameter"
BUFFER = "buffer"

Shapes = dict[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True)
class Found:
    """One distinct tensor of a model. `plain` means an attribute that is neither parameter nor
    buffer; it is stored as a buffer, and set as an attribute again."""

    name: str
    kind: str
    tensor: torch.Tensor
    plain: bool = False
    # Further tensor objects over the same memory: they move with it.
    twins: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Inventory:
    """The distinct tensors of a model, and for every further name of one the name it stands
    under."""

    tensors: tuple[Found, ...]
    aliases: dict[str, str]
    plain: tuple[str, ...]


class StructureError(Exception):
    """A generation does not fit the model that was built for it."""


def read_inventory(model: nn.Module) -> Inventory:
    """Given a model, return its tensors. Names of one object, or of one piece of memory, are
    aliases."""
    found: list[Found] = []
    aliases: dict[str, str] = {}
    plain: list[str] = []
    by_identity: dict[Any, Found] = {}
    for item in _walk(model):
        if item.plain:
            plain.append(item.name)
        tensor = item.tensor
        marks: list[Any] = [(id(tensor), item.kind)]
        if tensor.device.type != "meta" and tensor.numel():
            place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
            marks.append((place, item.kind, item.plain))
        known = next((by_identity[mark] for mark in marks if mark in by_identity), None)
        if known is not None:
            aliases[item.name] = known.name
            if tensor is not known.tensor:
                known.twins.append(tensor)
            continue
        for mark in marks:
            by_identity[mark] = item
        found.append(item)
    return Inventory(tuple(found), aliases, tuple(plain))


def read_shapes(model: nn.Module) -> Shapes:
    """Given a model, return the shape and dtype of every parameter and buffer name."""
    return {
        item.name: (tuple(item.tensor.shape), dtype_name(item.tensor.dtype))
        for item in _walk(model)
        if not item.plain
    }


def check_shapes(model_shapes: Shapes, stored: Shapes) -> None:
    """Given what a freshly built model has and what is stored, raise StructureError naming what
    differs. Both directions: a tensor that nothing fills would be served with whatever memory
    held."""
    names = sorted(
        name for name in {*model_shapes, *stored} if model_shapes.get(name) != stored.get(name)
    )
    if names:
        raise StructureError(f"{len(names)} tensors differ, among them {', '.join(names[:3])}")


def read_scalars(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Given a model, return the plain values (bool, int, float, str, None) of each module by
    name."""
    return {
        name: {
            attribute: value
            for attribute, value in vars(module).items()
            if value is None or isinstance(value, bool | int | float | str)
        }
        for name, module in model.named_modules()
    }


def find_changed(
    before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Given the plain values before and after loading, return those that loading set."""
    missing = object()
    changed: dict[str, dict[str, Any]] = {}
    for name, values in after.items():
        old = before.get(name, {})
        new = {key: value for key, value in values.items() if old.get(key, missing) != value}
        if new:
            changed[name] = new
    return changed


def set_scalars(model: nn.Module, values: Mapping[str, Mapping[str, Any]]) -> None:
    """Given plain values by module, set them."""
    modules = dict(model.named_modules())
    for name, attributes in values.items():
        module = modules.get(name)
        if module is None:
            raise StructureError(f"there is no module {name}")
        for attribute, value in attributes.items():
            setattr(module, attribute, value)


def set_tensors(
    model: nn.Module,
    tensors: Mapping[str, tuple[str, torch.Tensor]],
    aliases: Mapping[str, str],
    plain: frozenset[str],
) -> None:
    """Given tensors by name with their kind, put them into a model that was built on the meta
    device.

    A parameter keeps its class and its attributes (weight loaders, sharding dimensions), and names
    that were one tensor are one object again."""
    modules = dict(model.named_modules(remove_duplicate=False))
    placed: dict[str, tuple[str, torch.Tensor]] = {}
    for name, (kind, tensor) in tensors.items():
        module, leaf = _place(modules, name)
        value = tensor
        if kind == PARAMETER:
            value = _like_parameter(module._parameters.get(leaf), tensor)
        _set(module, leaf, kind, value, name in plain)
        placed[name] = (kind, value)
    for name, original in aliases.items():
        if original not in placed:
            raise StructureError(f"{name} is tied to {original}, which is not stored")
        module, leaf = _place(modules, name)
        kind, value = placed[original]
        _set(module, leaf, kind, value, name in plain)


def find_meta(model: nn.Module) -> list[str]:
    """Given a model, return where a tensor without memory is left: in modules, their lists and
    dictionaries, and in the objects they hold (attention backends keep tensors of their own)."""
    left: set[str] = set()
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute == "_modules":
                continue
            if _holds_meta(value, depth=2):
                left.add(f"{name}.{attribute}" if name else attribute)
    return sorted(left)


def dtype_name(dtype: torch.dtype) -> str:
    """Given a dtype, return its name without `torch.`."""
    return str(dtype).removeprefix("torch.")


def _walk(model: nn.Module) -> Iterator[Found]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield Found(name, PARAMETER, parameter)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield Found(name, BUFFER, buffer)
    for name, module in model.named_modules(remove_duplicate=False):
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield Found(f"{name}.{attribute}" if name else attribute, BUFFER, value, plain=True)


def _place(modules: Mapping[str, nn.Module], name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    module = modules.get(path)
    if module is None:
        raise StructureError(f"{name} has no module")
    return module, leaf


def _like_parameter(old: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    kind = type(old) if old is not None else nn.Parameter
    new: torch.Tensor = torch.Tensor._make_subclass(kind, tensor, False)
    if old is not None:
        new.__dict__.update(old.__dict__)
    return new


def _set(module: nn.Module, leaf: str, kind: str, value: torch.Tensor, plain: bool) -> None:
    if plain:
        module.__dict__[leaf] = value
    elif kind == PARAMETER:
        module._parameters[leaf] = value
    else:
        module._buffers[leaf] = value


def _holds_meta(value: Any, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(value.is_meta)
    if depth == 0 or isinstance(value, nn.Module):
        return False
    if isinstance(value, dict):
        return any(_holds_meta(item, depth - 1) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_meta(item, depth - 1) for item in value)
    if type(value).__module__.startswith("vllm.") and hasattr(value, "__dict__"):
        return any(_holds_meta(item, depth - 1) for item in vars(value).values())
    return False
