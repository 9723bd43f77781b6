# SPDX-License-Identifier: Apache-2.0
"""Which models the vault can hold. Everything else is served from disk, with the reason."""

from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

# Their post-processing writes into no weight: on a CPU it packs a copy, on a GPU it does nothing.
# Others may transform in place, and a shared segment is read-only.
_SAFE = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, BaseKVCacheMethod)


def find_unsupported(model: nn.Module) -> str:
    """Given a model, return why its tensors cannot be shared; "" where they can."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and not isinstance(method, _SAFE):
            return f"layer {name or '<root>'} has {type(method).__name__}, which is not shared"
    if getattr(model, "secondary_weights", None):
        return "weights come from a second checkpoint"
    return ""
