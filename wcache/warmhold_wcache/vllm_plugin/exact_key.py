# SPDX-License-Identifier: Apache-2.0
"""The exact key: everything that decides which bytes a rank's weights are and how they are laid
out.

It has the fields that vLLM 0.33 compares (WeightCacheKey, 22 of them) for every supported version,
0.31 to 0.33, whose own keys have fewer, and those that upstream lacks: what the weight files
contain, the whole model configuration, the CPU linear path, and the stage at which tensors were
taken. Built before loading: loading may change the configuration.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import vllm.version
from vllm.distributed import (
    get_dp_group,
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)

from warmhold_wcache.content import Content

# Raised when the same inputs come to be stored otherwise.
_LAYOUT = "1"
# In the configuration, and without bearing on weights: where it was read, and by which library.
_INCIDENTAL = ("_name_or_path", "name_or_path", "transformers_version", "_commit_hash")


def build_exact_key(
    vllm_config: Any,
    model_config: Any,
    content: Content,
    *,
    device: str,
    stage: str,
    cpu_linear: str,
    disk_format: str,
) -> dict[str, str]:
    """Given a rank's configuration after its groups are set up, its checkpoint's content, the
    device type, the stage ("loaded" or "processed"), the CPU linear path ("" off a CPU) and the
    load format that reads the checkpoint, return the key. A draft model is known by its
    identity."""
    hf_config = model_config.hf_config
    parallel = vllm_config.parallel_config
    cache = vllm_config.cache_config
    kernel = getattr(vllm_config, "kernel_config", None)
    speculative = vllm_config.speculative_config
    dp = get_dp_group()
    pp = get_pp_group()
    fields: dict[str, Any] = {
        # The 22 of vLLM 0.33.
        "checkpoint": _hash([(Path(v.path).name, v.size_bytes) for v in content.versions]),
        "model_arch": ",".join(getattr(hf_config, "architectures", None) or []),
        "tp_size": get_tensor_model_parallel_world_size(),
        "tp_rank": get_tensor_model_parallel_rank(),
        "dtype": str(model_config.dtype),
        "quantization": model_config.quantization,
        "quant_config_hash": _hash(
            [
                _plain(getattr(hf_config, "quantization_config", None)),
                _plain(getattr(model_config, "quantization_config", None)),
            ]
        ),
        "rope_parameters_hash": _hash(_rope(model_config.hf_text_config)),
        "kv_cache_dtype": cache.cache_dtype,
        "kv_cache_dtype_skip_layers": sorted(set(getattr(cache, "kv_cache_dtype_skip_layers", ()))),
        "revision": model_config.revision,
        "vllm_version": vllm.version.__version__,
        "pp_size": pp.world_size,
        "pp_rank": pp.rank_in_group,
        "is_draft": speculative is not None and model_config is speculative.draft_model_config,
        "dp_size": dp.world_size,
        "dp_rank": dp.rank_in_group,
        "enable_expert_parallel": parallel.enable_expert_parallel,
        "expert_placement_strategy": getattr(parallel, "expert_placement_strategy", "linear"),
        "moe_backend": getattr(kernel, "moe_backend", "auto"),
        "linear_backend": getattr(kernel, "linear_backend", "auto"),
        "linear_backend_per_quant": sorted(
            (getattr(kernel, "linear_backend_per_quant", None) or {}).items()
        ),
        # What upstream's key lacks.
        "content": content.digest,
        "hf_config_hash": _hash(_without_incidental(_plain(hf_config))),
        "model_impl": str(getattr(model_config, "model_impl", "")),
        "convert_type": str(getattr(model_config, "convert_type", "")),
        "multimodal_hash": _hash(_plain(getattr(model_config, "multimodal_config", None))),
        "disk_format": disk_format,
        "device": device,
        "stage": stage,
        "cpu_linear": cpu_linear,
        "layout": _LAYOUT,
    }
    return {name: _text(value) for name, value in fields.items()}


def _rope(text_config: Any) -> dict[str, Any]:
    return {
        name: _numbers(_plain(getattr(text_config, name, None)))
        for name in ("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings")
    }


def _numbers(value: Any) -> Any:
    """1e4 and 10000 are the same base."""
    if isinstance(value, dict):
        return {name: _numbers(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _plain(value: Any) -> Any:
    for method in ("to_dict", "model_dump"):
        if callable(convert := getattr(value, method, None)):
            return convert()
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name, None)) for name in value.__dataclass_fields__}
    return value


def _without_incidental(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            str(name): _without_incidental(item)
            for name, item in value.items()
            if name not in _INCIDENTAL
        }
    if isinstance(value, list | tuple):
        return [_without_incidental(item) for item in value]
    return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=_stable)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _stable(value: Any) -> str:
    if isinstance(value, set | frozenset):  # its order is another one in each process
        return json.dumps(sorted(map(str, value)))
    # An object's address in its text would make every start another key.
    text = str(value)
    return type(value).__qualname__ if " at 0x" in text else text
