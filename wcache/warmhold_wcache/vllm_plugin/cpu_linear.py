# SPDX-License-Identifier: Apache-2.0
"""Which memory a CPU's linear layers compute from: tensors that can be shared, or private copies.

vLLM packs each linear weight, and an output head tied to the embedding, into memory of oneDNN or of
its sgl kernels, and drops the parameter. What oneDNN packs is opaque and cannot be shared. What the
sgl kernels read is a tensor of the same shape and type, so on the shared path a weight is put into
their order once, by the engine that publishes it, where the CPU has their instructions (AVX-512
with bf16); elsewhere the layers compute from the plain tensor. bench/NOTES-linear.md has the
numbers. Upstream: vllm/model_executor/layers/utils.py, dispatch_cpu_unquantized_gemm.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from vllm import _custom_ops as ops
from vllm.model_executor.layers import utils as upstream
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

_upstream_dispatch: Callable[..., None] = upstream.dispatch_cpu_unquantized_gemm

# On a parameter: its elements are in the kernels' order. On an output head: a second tensor in that
# order, because the embedding that it may be tied to is looked up in the first.
PACKED = "warmhold_packed"
HEAD = "warmhold_packed_head"


class CpuLinear(StrEnum):
    """The two paths. Their results differ in rounding, so the path is part of the key."""

    SHARED = "shared"
    PACKED = "packed"


def select_cpu_linear(path: CpuLinear) -> None:
    """Given a path, make the layers of this process that are loaded from now on take it."""
    # Linear and embedding methods import the name when they use it, so that this place is enough.
    upstream.dispatch_cpu_unquantized_gemm = (
        _dispatch_shared if path is CpuLinear.SHARED else _upstream_dispatch
    )


def describe_cpu_linear(path: CpuLinear) -> str:
    """Given a path, return what the key says of it: on the shared one also the tensors' order."""
    if path is CpuLinear.PACKED:
        return "packed"
    return "shared-vnni" if _has_kernels() else "shared-plain"


def prepare_shared(model: nn.Module) -> None:
    """Given a model that was loaded and not yet post-processed, put its weights into the order in
    which they are shared. One weight at a time is held twice."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module, ParallelLMHead):
            _prepare_head(module)
        elif isinstance(method, UnquantizedLinearMethod):
            _prepare(module)


def list_packed(model: nn.Module) -> list[str]:
    """Given a model, return the names of the parameters that are in the kernels' order."""
    return [name for name, value in model.named_parameters() if hasattr(value, PACKED)]


def mark_packed(model: nn.Module, names: list[str]) -> None:
    """Given a model on shared tensors, mark the parameters that are in the kernels' order."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        setattr(parameters[name], PACKED, True)


def forget_heads(model: nn.Module) -> None:
    """Given a model whose weights are about to change, let its output heads compute from the weight
    itself: a second tensor would keep the old values."""
    for module in model.modules():
        if module.__dict__.pop(HEAD, None) is not None:
            module.cpu_linear = torch.nn.functional.linear


def guard_loading(model: nn.Module) -> None:
    """Given a model on the shared path, refuse that weights in the checkpoint's order are written
    into tensors in the kernels' order. vLLM's reload puts fresh tensors in their place first."""
    load_weights = model.load_weights

    def load_checked(*args: Any, **kwargs: Any) -> Any:
        if packed := list_packed(model):
            raise RuntimeError(
                f"{packed[0]} is in a kernel's order: change weights with reload_weights, or serve "
                "with cpu_linear=packed"
            )
        return load_weights(*args, **kwargs)

    model.load_weights = load_checked


def _dispatch_shared(layer: Any, remove_weight: bool) -> None:
    weight = layer.weight
    if weight.is_meta or weight.ndim != 2:
        # Not a linear layer: convolutions and experts keep upstream's treatment.
        _upstream_dispatch(layer, remove_weight)
        return
    layer.cpu_linear = torch.nn.functional.linear
    if isinstance(layer, ParallelLMHead):
        _prepare_head(layer)
        if (packed := getattr(layer, HEAD, None)) is not None:
            layer.cpu_linear = lambda x, weight, bias: _multiply(x, packed, bias)
    elif remove_weight:  # a linear layer: nobody else reads its weight
        _prepare(layer)  # weights that were reloaded come in the checkpoint's order
        if hasattr(layer.weight, PACKED):
            layer.cpu_linear = _multiply


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    bias = None if bias is None else bias.to(torch.float32)
    result: torch.Tensor = ops.weight_packed_linear_cpu(x, weight, weight.size(0), bias)
    return result


def _prepare(layer: Any) -> None:
    weight = layer.weight
    if hasattr(weight, PACKED) or getattr(layer, "_cpu_skip_gemm_dispatch", False):
        return
    if _fits(weight):
        weight.data = torch.ops._C.convert_weight_packed(weight.data)
        setattr(weight, PACKED, True)


def _prepare_head(layer: Any) -> None:
    if _fits(layer.weight) and not isinstance(getattr(layer, HEAD, None), torch.Tensor):
        setattr(layer, HEAD, torch.ops._C.convert_weight_packed(layer.weight.data))


def _fits(weight: torch.Tensor) -> bool:
    if weight.is_meta or weight.ndim != 2 or weight.dtype != torch.bfloat16 or not _has_kernels():
        return False
    outputs, inputs = weight.shape
    return bool(outputs % 16 == 0 and inputs % 32 == 0)


def _has_kernels() -> bool:
    return hasattr(torch.ops._C, "convert_weight_packed") and bool(
        torch.cpu._is_avx512_bf16_supported()
    )
