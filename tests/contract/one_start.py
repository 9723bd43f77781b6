# SPDX-License-Identifier: Apache-2.0
"""One start of the real vLLM, offline: loads a model, answers, and prints what it saw as one JSON
line.

    python one_start.py '{"model": ..., "load_format": ..., "extra": {...}, "measure": false}'

Runs inside the image. The plug-in is found as any user's would be: through its entry point.
"""

import json
import os
import sys
import time
from pathlib import Path

PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):",
    "Once upon a time",
    "The three primary colours are",
    "In 1969 the first",
    "SELECT name FROM",
    "My favourite food is",
    "The opposite of cold is",
    "To be or not to be,",
    "A triangle has",
    "The largest planet is",
    "import numpy as",
    "Dear Sir or Madam,",
    "One, two, three,",
    "The sun rises in the",
    "She opened the door and",
    "HTTP status 404 means",
    "The chemical symbol of gold is",
    "Bonjour, je",
]


def tree() -> list[int]:
    """This process and everything below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parent = int(stat.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    return found


def memory() -> dict[str, int]:
    """Bytes of the tree: private, of files, and of shared memory."""
    total = {"RssAnon": 0, "RssFile": 0, "RssShmem": 0}
    for pid in tree():
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        for line in status.splitlines():
            name = line.partition(":")[0]
            if name in total:
                total[name] += int(line.split()[1]) * 1024
    return total


def mapped(suffix: str) -> list[str]:
    """Files of that suffix that a process of the tree maps."""
    found = set()
    for pid in tree():
        try:
            text = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        found |= {line.split(None, 5)[5] for line in text.splitlines() if line.endswith(suffix)}
    return sorted(found)


def look(worker) -> dict[str, object]:
    """In the worker: how its weights lie in memory."""
    from pathlib import Path

    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:weights" in line or "memfd:warmhold" in line:
            low, high = line.split()[0].split("-")
            ranges.append((int(low, 16), int(high, 16), line.split()[1]))
    model = worker.get_model()
    named = dict(model.named_parameters(remove_duplicate=False))
    shared = [
        name
        for name, tensor in named.items()
        if any(low <= tensor.data_ptr() < high for low, high, _ in ranges)
    ]
    head = named.get("lm_head.weight")
    embedding = named.get("model.embed_tokens.weight")
    return {
        "memfds": len(ranges),
        "rights": sorted({rights for _, _, rights in ranges}),
        "parameters": len(named),
        "shared": len(shared),
        "tied": head is not None and head is embedding,
        "loader": hasattr(embedding, "weight_loader"),
    }


def main() -> None:
    job = json.loads(sys.argv[1])
    if job.get("probe"):  # functions are sent to the worker
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    from vllm import LLM, SamplingParams

    began = time.monotonic()
    engine = LLM(
        model=job["model"],
        load_format=job.get("load_format", "warmhold"),
        model_loader_extra_config=job.get("extra", {}),
        enforce_eager=True,
        kv_cache_memory_bytes=268435456,
        max_model_len=job.get("max_model_len", 1024),
        enable_prefix_caching=False,
        skip_tokenizer_init=job.get("tokens_only", False),
        **job.get("arguments", {}),
    )
    result = {"start_s": time.monotonic() - began, "memory": memory()}
    greedy = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    prompts = PROMPTS
    if job.get("tokens_only"):
        prompts = [{"prompt_token_ids": [(7 * i + j) % 1000 for j in range(8)]} for i in range(20)]
    outputs = engine.generate(
        prompts, SamplingParams(max_tokens=8, logprobs=1, **greedy), use_tqdm=False
    )
    result["answers"] = [
        [
            [token, row[token].logprob]
            for token, row in zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True)
        ]
        for o in outputs
    ]
    if job.get("probe"):
        result["probe"] = engine.collective_rpc(look)[0]
        again = SamplingParams(max_tokens=8, **greedy)

        def tokens() -> list[list[int]]:
            found = engine.generate(prompts, again, use_tqdm=False)
            return [list(output.outputs[0].token_ids) for output in found]

        result["quiesced"] = engine.collective_rpc("warmhold_quiesce")[0]
        result["probe_quiesced"] = engine.collective_rpc(look)[0]["memfds"]
        result["resumed"] = engine.collective_rpc("warmhold_resume")[0]
        result["tokens_resumed"] = tokens()
        engine.collective_rpc("reload_weights")
        result["tokens_reloaded"] = tokens()
        result["reloaded"] = engine.collective_rpc("warmhold_state")[0]
    result["mapped"] = mapped(".safetensors")
    result["memory_after"] = memory()
    if job.get("measure"):
        result |= measure(engine, greedy, job["measure"])
        result["memory_measured"] = memory()
    print("RESULT " + json.dumps(result), flush=True)


def measure(engine, greedy, tokens: int) -> dict[str, float]:
    """Tokens per second of decoding at batch 1 and 8, and seconds of an 800-token prefill."""
    from vllm import SamplingParams

    def seconds(batch: int, prompt: int, count: int) -> float:
        prompts = [
            {"prompt_token_ids": [(31 * b + 7 * i) % 5000 + 10 for i in range(prompt)]}
            for b in range(batch)
        ]
        began = time.monotonic()
        engine.generate(prompts, SamplingParams(max_tokens=count, **greedy), use_tqdm=False)
        return time.monotonic() - began

    found = {}
    seconds(1, 16, 4)
    for batch in (1, 8):
        seconds(batch, 16, 4)
        first = min(seconds(batch, 16, 1) for _ in range(2))
        found[f"decode_{batch}"] = batch * tokens / (seconds(batch, 16, tokens + 1) - first)
    seconds(1, 800, 1)
    found["prefill_800_s"] = min(seconds(1, 800, 1) for _ in range(2))
    return found


if __name__ == "__main__":
    main()
