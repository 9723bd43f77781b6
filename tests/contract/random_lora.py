# SPDX-License-Identifier: Apache-2.0
"""Writes a LoRA adapter of random numbers for a Llama: `random_lora.py MODEL FOLDER`."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 8


def write_random_lora(model: Path, folder: Path) -> None:
    """Given a model's folder, write an adapter of its queries and values, large enough to change
    answers."""
    config = json.loads((model / "config.json").read_text())
    width = config["hidden_size"]
    narrow = width * config["num_key_value_heads"] // config["num_attention_heads"]
    torch.manual_seed(0)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, rows in (("q_proj", width), ("v_proj", narrow)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, width) * 0.05
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, RANK) * 0.05
    described = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK}
    described |= {"target_modules": ["q_proj", "v_proj"], "bias": "none"}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(described))


if __name__ == "__main__":
    write_random_lora(Path(sys.argv[1]), Path(sys.argv[2]))
