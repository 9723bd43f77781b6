# SPDX-License-Identifier: Apache-2.0
"""The contract with the real vLLM on a CPU: what a hit is, and that it is the same model.

    docker run --rm --shm-size 1g ... --entrypoint python warmhold:cpu tests/contract/weights.py

Prints a line per check and ends with 1 where one fails.
"""

import ctypes
import mmap
import os
import shutil
import sys
import tempfile
from pathlib import Path

import stand

# vLLM 0.33's WeightCacheKey, by name.
UPSTREAM_FIELDS = frozenset(
    """
    checkpoint model_arch tp_size tp_rank dtype quantization quant_config_hash
    rope_parameters_hash kv_cache_dtype kv_cache_dtype_skip_layers revision vllm_version pp_size
    pp_rank is_draft dp_size dp_rank enable_expert_parallel expert_placement_strategy moe_backend
    linear_backend linear_backend_per_quant
    """.split()  # noqa: SIM905
)
failures: list[str] = []


def check(name: str, holds: bool, seen: object = "") -> None:
    """Print a check; what was seen says why it failed."""
    print(f"{'ok  ' if holds else 'FAIL'} {name} {seen}", flush=True)
    if not holds:
        failures.append(name)


def cached_bytes(path: Path) -> int:
    """How much of a file the page cache holds."""
    size = path.stat().st_size
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (*(ctypes.c_void_p, ctypes.c_size_t), *(ctypes.c_int,) * 3, ctypes.c_long)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    with path.open("rb") as file:
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        assert libc.mincore(address, size, pages) == 0
        libc.munmap(address, size)
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def forget(path: Path) -> None:
    """Take a file out of the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def tokens(result: dict) -> list[list[int]]:
    return [[token for token, _ in answer] for answer in result.get("answers", [])]


def main() -> int:
    wanted = sys.argv[1:] or ["hit", "packed", "format", "wrong"]
    model = Path(tempfile.mkdtemp(prefix="model-")) / "demo"
    shutil.copytree(stand.MODEL, model)
    weights = model / "model.safetensors"
    os.utime(weights)
    import time

    time.sleep(2.5)  # a file that was just written has no digest that is kept
    vault = stand.Vault()
    try:
        disk = stand.start(model=str(model), extra=vault.extra(mode="auto"))
        print(disk["line"], flush=True)
        said = stand.words(disk)
        check("a first start loads from disk and publishes", "published" in said, said)
        check_key(vault)
        if "hit" in wanted:
            check_hit(vault, model, weights, disk)
        if "packed" in wanted:
            check_packed(vault, model, disk)
        if "format" in wanted:
            check_format(vault, model, disk)
        if "wrong" in wanted:
            check_wrong(vault, model, weights)
    finally:
        vault.stop()
        shutil.rmtree(model.parent)
    return 1 if failures else 0


def check_key(vault: stand.Vault) -> None:
    from dataclasses import fields

    from vllm.model_executor.model_loader.weight_cache.protocol import WeightCacheKey
    from warmhold_wcache.client import VaultClient

    installed = {field.name for field in fields(WeightCacheKey)}
    with VaultClient(vault.socket) as client:
        (row,) = client.stat()
    lacking = (UPSTREAM_FIELDS | installed) - row["key"].keys()
    check("the key has all of upstream's fields", not lacking, sorted(lacking))
    check("and what upstream's lacks", {"content", "cpu_linear", "stage"} <= row["key"].keys())


def check_hit(vault: stand.Vault, model: Path, weights: Path, disk: dict) -> None:
    forget(weights)
    before = cached_bytes(weights)
    hit = stand.start(model=str(model), extra=vault.extra(mode="ipc_cache"), probe=True)
    print(hit["line"], flush=True)
    said = stand.words(hit)
    check("a second start maps", said.get("mode") == "ipc_cache", said)
    same = hit.get("answers") == disk["answers"] and len(disk["answers"]) == 20
    check("tokens and log-probabilities are equal", same)
    check("no weight file is mapped", hit.get("mapped") == [], hit.get("mapped"))
    probe = hit.get("probe", {})
    check("segments are read-only", probe.get("rights") == ["r--s"], probe)
    check("every parameter is shared", probe["shared"] == probe["parameters"] > 0, probe)
    check("tied weights are one tensor", probe["tied"], probe)
    check("parameters keep their loaders", probe["loader"], probe)
    check("quiesced, nothing is mapped", hit["probe_quiesced"] == 0, hit["quiesced"])
    check("resumed, tokens are equal", hit["tokens_resumed"] == tokens(disk), hit["resumed"])
    check("reloaded, tokens are equal", hit["tokens_reloaded"] == tokens(disk), hit["reloaded"])
    check("reloaded, the model left its segments", bool(hit["reloaded"]["detached"]))
    # The reload above reads the file, so reading is looked at in a start of its own.
    forget(weights)
    before = cached_bytes(weights)
    again = stand.start(model=str(model), extra=vault.extra(mode="auto"))
    after = cached_bytes(weights)
    check("at most the header is read", after - before <= 1 << 20, f"{before} -> {after} bytes")
    check("after a reload the vault's weights are the old", again["answers"] == disk["answers"])


def check_packed(vault: stand.Vault, model: Path, shared: dict) -> None:
    packed = stand.start(model=str(model), extra=vault.extra(cpu_linear="packed"))
    print(packed["line"], flush=True)
    said = stand.words(packed)
    check("the other linear path is a miss", said.get("fields") == "cpu_linear", said)
    hit = stand.start(model=str(model), extra=vault.extra(cpu_linear="packed"))
    print(hit["line"], flush=True)
    check("then it is a hit", stand.words(hit).get("mode") == "ipc_cache")
    check("packed: tokens and log-probabilities are equal", hit["answers"] == packed["answers"])
    same = sum(a == b for a, b in zip(tokens(shared), tokens(packed), strict=True))
    print(f"     packed and shared agree in the tokens of {same} of 20 prompts", flush=True)


def check_format(vault: stand.Vault, model: Path, disk: dict) -> None:
    extra = vault.extra()
    del extra["socket_path"]
    extra |= {"socket_dir": str(vault.folder), "fallback": False, "mode": "copy"}
    copy = stand.start(model=str(model), load_format="ipc_cache", extra=extra)
    print(copy["line"], flush=True)
    check("ipc_cache is this loader on a CPU", stand.words(copy).get("mode") == "ipc_cache")
    check("a copy gives equal tokens", copy.get("answers") == disk["answers"])
    stock = stand.start(model=str(model), load_format="auto", extra={})
    check("without the load format nothing is changed", not stock["line"] and not stock["code"])


def check_wrong(vault: stand.Vault, model: Path, weights: Path) -> None:
    before = weights.stat()
    with weights.open("r+b") as file:
        file.seek(-1001, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1001, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    wrong = stand.start(model=str(model), extra=vault.extra(mode="auto"))
    print(wrong["line"], flush=True)
    said = stand.words(wrong)
    check("one flipped bit, mtime forged: content", said.get("fields") == "content", said)
    refused = stand.start(
        model=str(model), fails=True, extra=vault.extra(mode="ipc_cache", cpu_linear="packed")
    )
    check("mode ipc_cache without a hit ends", refused["code"] != 0, refused["code"])
    check("and names the fields", "key-mismatch" in refused["log"])


if __name__ == "__main__":
    sys.exit(main())
