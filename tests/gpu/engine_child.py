# SPDX-License-Identifier: Apache-2.0
"""One start of the real vLLM on a GPU, in one process: it answers, sleeps, answers again.

The job is JSON: model, load_format, extra (the loader's), graphs (CUDA graphs, without a compiler),
sleep (rounds of `sleep`, `sleep-2` or `quiesce`, each with the wake-up). Sleep mode is `warmhold`
wherever the load format is.
"""

import json
import os
import sys
import time
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # `look` is sent to the worker

import torch
from gpu_stand import tell, tell_and_wait, used_bytes
from vllm import LLM, SamplingParams

PROMPTS = [{"prompt_token_ids": [(7 * i + j) % 1000 for j in range(8)]} for i in range(20)]
ANSWER = SamplingParams(
    max_tokens=16, logprobs=1, temperature=0.0, ignore_eos=True, detokenize=False
)


def start(job: dict[str, Any]) -> LLM:
    """The engine, on a fifth of the GPU, or with a KV cache of a size that is given."""
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [8, 24]}
    own = job["load_format"] == "warmhold"
    return LLM(
        model=job["model"],
        load_format=job["load_format"],
        model_loader_extra_config=job.get("extra", {}),
        skip_tokenizer_init=True,
        max_model_len=1024,
        gpu_memory_utilization=job.get("share", 0.2),
        kv_cache_memory_bytes=job.get("kv_bytes"),
        enable_prefix_caching=False,
        enforce_eager=not job.get("graphs", False),
        enable_sleep_mode=True,
        sleep_mode_backend="warmhold" if own else "cumem",
        **({"compilation_config": graphs} if job.get("graphs") else {}),
    )


def answer(engine: LLM) -> list[list[list[float]]]:
    """Tokens with their log-probabilities, for every prompt."""
    outputs = [output.outputs[0] for output in engine.generate(PROMPTS, ANSWER, use_tqdm=False)]
    return [
        [[token, row[token].logprob] for token, row in zip(o.token_ids, o.logprobs, strict=True)]
        for o in outputs
    ]


def look(worker: Any) -> dict[str, Any]:
    """In the worker: where its tensors lie, and what vLLM's sleep-mode pool holds, in bytes."""
    from vllm.device_allocator import get_mem_allocator_instance
    from warmhold_wcache.vllm_plugin import residency

    pool: dict[str, int] = {}
    for data in get_mem_allocator_instance().pointer_to_data.values():
        pool[data.tag] = pool.get(data.tag, 0) + data.handle[1]
    ranges = [
        (address, address + segment.size_bytes)
        for resident in residency.RESIDENT
        for segment, address in zip(resident.generation.segments, resident.addresses, strict=True)
    ]
    parameters = list(worker.get_model().parameters())
    shared = [p for p in parameters if any(low <= p.data_ptr() < high for low, high in ranges)]
    return {
        **{"pool": pool, "parameters": len(parameters), "shared": len(shared)},
        **{"segments": len(ranges), "torch": torch.cuda.memory_allocated()},
        "read_only": [getattr(r.memory, "can_forbid_writing", None) for r in residency.RESIDENT],
    }


def count_copied(_: Any) -> int:
    """In the worker: bytes that vLLM has copied to the host for a sleep."""
    from vllm.device_allocator import get_mem_allocator_instance

    copies = [
        data.cpu_backup_tensor for data in get_mem_allocator_instance().pointer_to_data.values()
    ]
    return sum(copy.numel() for copy in copies if copy is not None)


def free_bytes() -> int:
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def sleep_once(engine: LLM, suspend: str) -> dict[str, Any]:
    """Sleep and wake up, by vLLM's own call or by the worker methods of a snapshot."""
    own = suspend != "quiesce"
    level = 2 if suspend == "sleep-2" else 1
    before, began = free_bytes(), time.monotonic()
    said = engine.sleep(level=level) if own else engine.collective_rpc("warmhold_quiesce")[0]
    slept, asleep = time.monotonic(), free_bytes()
    state = engine.collective_rpc("warmhold_state")[0]
    copied = engine.collective_rpc(count_copied)[0]
    woken = time.monotonic()
    back = engine.wake_up() if own else engine.collective_rpc("warmhold_resume")[0]
    errors = [item["error"] for item in (said, back) if isinstance(item, dict) and "error" in item]
    seconds = [round(slept - began, 4), round(time.monotonic() - woken, 4)]
    return {
        **{"how": suspend, "sleep_s": seconds[0], "wake_s": seconds[1]},
        **{
            "freed": asleep - before,
            "copied": copied,
            "state": state,
            "errors": errors,
            "after": free_bytes() - before,
        },
        "answers": answer(engine),
    }


def main() -> None:
    job = json.loads(sys.argv[1])
    began = time.monotonic()
    engine = start(job)
    seen: dict[str, Any] = {"start_s": round(time.monotonic() - began, 1), "pid": os.getpid()}
    seen["blocks"] = engine.llm_engine.vllm_config.cache_config.num_gpu_blocks
    seen["answers"] = answer(engine)
    seen["look"] = engine.collective_rpc(look)[0]
    seen["used"] = used_bytes()
    tell_and_wait(seen)
    for suspend in job.get("sleep", []):
        tell(sleep_once(engine, suspend))
    tell({"end": True})


if __name__ == "__main__":
    main()
