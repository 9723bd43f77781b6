# SPDX-License-Identifier: Apache-2.0
"""Which memory a CPU's linear layers compute from: the plain tensors, or private packed copies.

vLLM packs each linear weight, and an output head tied to the embedding, into memory of oneDNN or
of its sgl kernels, and drops the parameter. Packed weights cannot be shared, so on the shared path
the layers stay on the tensors that the vault holds. Upstream: vllm/model_executor/layers/utils.py,
dispatch_cpu_unquantized_gemm.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import torch
from vllm.model_executor.layers import utils as upstream

_upstream_dispatch: Callable[..., None] = upstream.dispatch_cpu_unquantized_gemm


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


def _dispatch_shared(layer: Any, remove_weight: bool) -> None:
    weight = layer.weight
    if weight.is_meta or weight.ndim != 2:
        # Not a linear layer: convolutions and experts keep upstream's treatment.
        _upstream_dispatch(layer, remove_weight)
        return
    layer.cpu_linear = torch.nn.functional.linear
