# SPDX-License-Identifier: Apache-2.0
"""A Llama with random bf16 weights of a given size, written as a checkpoint with a tokenizer."""

import json
from pathlib import Path

HIDDEN, INTERMEDIATE, HEADS, VOCABULARY = 2048, 5632, 16, 32000
LAYER_BYTES = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE + 2 * HIDDEN)
EMBEDDING_BYTES = 2 * (VOCABULARY * HIDDEN + HIDDEN)


def write_random_llama(folder: Path, size_bytes: int, seed: int = 0, device: str = "cpu") -> int:
    """Given a folder, a size and where random numbers are made, write the checkpoint there; return
    the bytes of its weights."""
    import torch
    from safetensors.torch import save_file

    layers = max(1, round((size_bytes - EMBEDDING_BYTES) / LAYER_BYTES))
    folder.mkdir(parents=True)
    source = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int) -> "torch.Tensor":
        made = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
        return made.normal_(0, 0.02, generator=source).cpu()

    tensors = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN)}
    tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    for index in range(layers):
        prefix = f"model.layers.{index}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{prefix}self_attn.{name}.weight"] = matrix(HIDDEN, HIDDEN)
        for name in ("gate_proj", "up_proj"):
            tensors[f"{prefix}mlp.{name}.weight"] = matrix(INTERMEDIATE, HIDDEN)
        tensors[f"{prefix}mlp.down_proj.weight"] = matrix(HIDDEN, INTERMEDIATE)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "num_hidden_layers": layers,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return sum(tensor.nbytes for tensor in tensors.values())


def write_tokenizer(folder: Path) -> None:
    """Given the checkpoint's folder, write a tokenizer there that knows a word for each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "w0",
        "bos_token": "w1",
        "eos_token": "w2",
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
