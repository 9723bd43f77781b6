# SPDX-License-Identifier: Apache-2.0
"""The linear layers alone: the plain tensor through torch, and vLLM's packed copy, taking turns.

    docker run --rm -v "$PWD:/src:ro" -e OMP_NUM_THREADS=2 --entrypoint python warmhold:cpu \
        /src/bench/linear_layers.py

The best of many short turns, so that a busy machine disturbs both alike. Times are a layer's in
microseconds; the last rows add up one decoding step of a whole model.
"""

import time

import torch
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

MODELS = {  # name: (count, inputs, outputs) of each kind of layer
    "demo, 135M": (
        (30, 576, 960),
        (30, 576, 576),
        (30, 576, 3072),
        (30, 1536, 576),
        (1, 576, 49152),
    ),
    "random Llama, 1 GB": (
        (9, 2048, 6144),
        (9, 2048, 2048),
        (9, 2048, 11264),
        (9, 5632, 2048),
        (1, 2048, 32000),
    ),
}
TURNS_S = 1.5


def best(acts: dict[str, object]) -> dict[str, float]:
    """The shortest time of each act, in turns."""
    found = dict.fromkeys(acts, float("inf"))
    end = time.monotonic() + TURNS_S
    turns = 0
    while time.monotonic() < end or turns < 5:
        turns += 1
        for name, act in acts.items():
            began = time.perf_counter()
            act()
            found[name] = min(found[name], time.perf_counter() - began)
    return found


def main() -> None:
    print("threads", torch.get_num_threads(), torch.backends.cpu.get_cpu_capability())
    print("| model | rows | inputs -> outputs | plain, us | packed, us | plain / packed |")
    print("|---|---|---|---|---|---|")
    for model, layers in MODELS.items():
        for rows in (1, 8, 800):
            whole = {"plain": 0.0, "packed": 0.0}
            for count, inputs, outputs in layers:
                layer = torch.nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)
                plain = layer.weight.detach().clone()
                dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
                # The head sees one row per request, also in a prefill.
                x = torch.randn(1 if count == 1 and rows == 800 else rows, inputs).bfloat16()
                packed = layer.cpu_linear
                found = best(
                    {
                        "plain": lambda x=x, w=plain: torch.nn.functional.linear(x, w),
                        "packed": lambda x=x, f=packed: f(x, None, None),
                    }
                )
                for name, value in found.items():
                    whole[name] += count * value
                row(model, rows, f"{inputs} -> {outputs}", found)
            row(model, rows, "**whole model**", whole)


def row(model: str, rows: int, shape: str, found: dict[str, float]) -> None:
    plain, packed = (found[name] * 1e6 for name in ("plain", "packed"))
    print(
        f"| {model} | {rows} | {shape} | {plain:.0f} | {packed:.0f} | {plain / packed:.2f} |",
        flush=True,
    )


if __name__ == "__main__":
    with torch.no_grad():
        main()
