# SPDX-License-Identifier: Apache-2.0
"""A Llama with random bf16 weights of any size, made on the GPU and written by several threads.

    python3 bench/gpu_model.py FOLDER 16gb

One file for each layer, in the layout of safetensors (a length, a header in JSON, the bytes).
"""

import json
import struct
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

THREADS = 4
SPARE_BYTES, GROWTH_S = 8 << 30, 60.0
UNKNOWN = "w0"


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    layers: int

    @property
    def size_bytes(self) -> int:
        """Of all weights."""
        tables = (self.tensors_of(index) for index in range(-1, self.layers))
        return sum(2 * count(shape) for table in tables for shape in table.values())

    def tensors_of(self, layer: int) -> dict[str, tuple[int, ...]]:
        """The tensors of a layer by name; of -1 those of no layer."""
        if layer < 0:
            return {
                "model.embed_tokens.weight": (self.vocabulary, self.hidden),
                "lm_head.weight": (self.vocabulary, self.hidden),
                "model.norm.weight": (self.hidden,),
            }
        head = self.hidden // self.heads
        kv = head * self.kv_heads
        prefix = f"model.layers.{layer}."
        return {
            f"{prefix}self_attn.q_proj.weight": (self.hidden, self.hidden),
            f"{prefix}self_attn.k_proj.weight": (kv, self.hidden),
            f"{prefix}self_attn.v_proj.weight": (kv, self.hidden),
            f"{prefix}self_attn.o_proj.weight": (self.hidden, self.hidden),
            f"{prefix}mlp.gate_proj.weight": (self.intermediate, self.hidden),
            f"{prefix}mlp.up_proj.weight": (self.intermediate, self.hidden),
            f"{prefix}mlp.down_proj.weight": (self.hidden, self.intermediate),
            f"{prefix}input_layernorm.weight": (self.hidden,),
            f"{prefix}post_attention_layernorm.weight": (self.hidden,),
        }


# A small one; Llama-3-8B's; Llama-3-70B's with fewer layers, so that it fits one GPU.
SHAPES = {
    "1gb": Shape(2048, 5632, 16, 16, 32000, 8),
    "16gb": Shape(4096, 14336, 32, 8, 128256, 32),
    "64gb": Shape(8192, 28672, 64, 8, 128256, 35),
}


def count(shape: tuple[int, ...]) -> int:
    """Given a shape, return how many elements it has."""
    total = 1
    for size in shape:
        total *= size
    return total


def build_header(tensors: Mapping[str, tuple[int, ...]]) -> bytes:
    """Given tensors' shapes, return what a file of safetensors with them in bf16 begins with."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in tensors.items():
        end = at + 2 * count(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def build_config(shape: Shape) -> dict[str, Any]:
    """Given a shape, return the model's config.json."""
    return {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"},
        **{"hidden_size": shape.hidden, "intermediate_size": shape.intermediate},
        **{"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads},
        **{"num_hidden_layers": shape.layers, "vocab_size": shape.vocabulary},
        **{"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
        **{"tie_word_embeddings": False, "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2},
    }


def write_model(folder: Path, shape: Shape) -> None:
    """Given a folder that does not exist and a shape, write the model and a tokenizer of whole
    words there."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(build_config(shape)))
    names = {index: f"model-{index + 1:05}.safetensors" for index in range(-1, shape.layers)}
    with ThreadPoolExecutor(THREADS) as pool:
        jobs = [
            pool.submit(_write_file, folder / name, shape.tensors_of(index), index + 1)
            for index, name in names.items()
        ]
        for job in jobs:
            job.result()
    place = {tensor: names[index] for index in names for tensor in shape.tensors_of(index)}
    index_text = {"metadata": {"total_size": shape.size_bytes}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_text))
    _write_tokenizer(folder, shape.vocabulary)


def _write_file(path: Path, tensors: Mapping[str, tuple[int, ...]], seed: int) -> None:
    import torch

    _wait_for_memory(2 * sum(map(count, tensors.values())))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.Generator(device).manual_seed(seed)
    with path.open("wb", buffering=0) as file:
        file.write(build_header(tensors))
        for shape in tensors.values():
            made = torch.ones(shape, dtype=torch.bfloat16, device=device)
            if len(shape) > 1:
                made.normal_(0, 0.02, generator=source)
            rest = memoryview(made.cpu().view(torch.int16).numpy()).cast("B")
            while rest:
                rest = rest[file.write(rest) :]


def _wait_for_memory(size_bytes: int) -> None:
    """Some machines' memory grows as it is used, and more slowly than this writes: wait until there
    is room for so many bytes besides some to spare, or for the limit."""
    deadline = time.monotonic() + GROWTH_S
    while time.monotonic() < deadline:
        text = Path("/proc/meminfo").read_text().partition("MemAvailable:")[2]
        if int(text.split()[0]) << 10 > size_bytes + SPARE_BYTES:
            return
        time.sleep(0.1)


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{index}": index for index in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        **{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": UNKNOWN, "bos_token": "w1"},
        **{"eos_token": "w2", "model_max_length": 8192},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    write_model(Path(sys.argv[1]), SHAPES[sys.argv[2]])
