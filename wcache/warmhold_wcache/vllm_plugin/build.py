# SPDX-License-Identifier: Apache-2.0
"""A hit: the model, built without memory, on tensors that are there already.

vLLM's post-processing runs as after a load from disk. A build that fails leaves no trace, because
the same process goes on and loads from disk.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from warmhold_wcache.generation import Generation
from warmhold_wcache.vllm_plugin import model_state, residency
from warmhold_wcache.vllm_plugin.cpu_linear import mark_packed
from warmhold_wcache.vllm_plugin.memory import Memory
from warmhold_wcache.vllm_plugin.model_state import StructureError
from warmhold_wcache.vllm_plugin.support import find_unsupported


def build_on(
    memory: Memory,
    generation: Generation,
    addresses: Sequence[int],
    vllm_config: Any,
    model_config: Any,
    prefix: str,
    *,
    device: torch.device,
    copy: bool,
) -> nn.Module:
    """Given a mapped generation and the configuration, return the model on its tensors; with `copy`
    on private copies. Raise StructureError where they do not fit; vLLM's tables are then as
    before."""
    with _undone_on_error(vllm_config), set_default_torch_dtype(model_config.dtype):
        with torch.device("meta"):
            model: nn.Module = initialize_model(
                vllm_config=vllm_config, model_config=model_config, prefix=prefix
            )
        if reason := find_unsupported(model):
            raise StructureError(reason)
        plain = frozenset(generation.attributes.get("plain", ()))
        model_state.check_shapes(model_state.read_shapes(model), _stored_shapes(generation, plain))
        tensors = residency.read_tensors(memory, generation, addresses, copy)
        model_state.set_tensors(model, tensors, generation.aliases, plain)
        model_state.set_scalars(model, generation.attributes.get("scalars", {}))
        mark_packed(model, generation.attributes.get("packed", []))
        if left := model_state.find_meta(model):
            raise StructureError(f"{len(left)} tensors have no memory, among them {left[0]}")
        _reload_to(model, device)
        with device:
            process_weights_after_loading(model, model_config, device)
    return model.eval()


def _stored_shapes(generation: Generation, plain: frozenset[str]) -> model_state.Shapes:
    stored = {tensor.name: (tensor.shape, tensor.dtype) for tensor in generation.tensors}
    stored |= {alias: stored[name] for alias, name in generation.aliases.items() if name in stored}
    return {name: value for name, value in stored.items() if name not in plain}


def _reload_to(model: nn.Module, device: torch.device) -> None:
    """Later reloads of layers create tensors on the device that vLLM noted when the model was
    built, which on a hit was the meta device."""
    with suppress(ImportError, AttributeError):
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for module in model.modules():
            get_layerwise_info(module).restore_device = device


@contextmanager
def _undone_on_error(vllm_config: Any) -> Iterator[None]:
    """Building a model enters its layers into tables, where a second build would find them taken,
    and rotary embeddings into a cache, where it would find tensors without memory."""
    compilation = vllm_config.compilation_config
    layers = dict(compilation.static_forward_context)
    experts = list(getattr(compilation, "static_all_moe_layers", ()))
    from vllm.model_executor.layers import rotary_embedding

    rotary = dict(rotary_embedding._ROPE_DICT)
    try:
        yield
    except BaseException:
        compilation.static_forward_context.clear()
        compilation.static_forward_context.update(layers)
        if hasattr(compilation, "static_all_moe_layers"):
            compilation.static_all_moe_layers[:] = experts
        rotary_embedding._ROPE_DICT.clear()
        rotary_embedding._ROPE_DICT.update(rotary)
        raise
