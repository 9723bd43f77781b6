# SPDX-License-Identifier: Apache-2.0
"""The contract with the real vLLM on a CPU: what a preload leaves is what an engine asks for.

    docker run --rm --shm-size 1g ... --entrypoint python warmhold:cpu tests/contract/preload.py

Prints a line per check and ends with 1 where one fails.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import stand
from random_llama import write_random_llama
from warmhold_wcache.client import VaultClient

failures: list[str] = []
ARGUMENTS = ["--max-model-len", "1024", "--enforce-eager"]


def check(name: str, holds: bool, seen: object = "") -> None:
    """Print a check; what was seen says why it failed."""
    print(f"{'ok  ' if holds else 'FAIL'} {name} {seen}", flush=True)
    if not holds:
        failures.append(name)


def preload(model: Path, vault: stand.Vault, *more: str, **extra: object) -> tuple[int, str, str]:
    """Preload; return exit code, what the module itself said, and the whole log."""
    began = time.monotonic()
    argv = [sys.executable, "-m", "warmhold_wcache.vllm_plugin.preload", str(model), *ARGUMENTS]
    argv += ["--model-loader-extra-config", json.dumps(vault.extra(**extra)), *more]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    text = done.stdout + done.stderr
    said = [
        line
        for line in text.splitlines()
        if line.startswith("error: ") or line.endswith((" published", " was resident already"))
    ]
    print(f"     {time.monotonic() - began:.1f} s, code {done.returncode}: {said}", flush=True)
    return done.returncode, "\n".join(said), text


def rows(vault: stand.Vault) -> list[dict]:
    with VaultClient(vault.socket) as client:
        return client.stat()


def left_behind() -> list[str]:
    """Processes other than this one and the vault."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in (1, os.getpid()):
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words != [b""] and b"warmhold_wcache.serve" not in words:
                found.append(b" ".join(words).decode())
    return found


def main() -> int:
    wanted = sys.argv[1:] or ["one", "two", "refusals", "changed"]
    model = Path(tempfile.mkdtemp(prefix="model-")) / "demo"
    shutil.copytree(stand.MODEL, model)
    vault = stand.Vault()
    try:
        if "one" in wanted:
            check_one(vault, model)
        if "two" in wanted:
            check_two(vault, model.parent / "llama")
        if "refusals" in wanted:
            check_refusals(vault, model)
        if "changed" in wanted:
            check_changed(vault, model)
    finally:
        vault.stop()
        shutil.rmtree(model.parent)
    return 1 if failures else 0


def check_one(vault: stand.Vault, model: Path) -> None:
    code, said, log = preload(model, vault)
    (row,) = rows(vault)
    check("a preload publishes", (code, said) == (0, f"{row['id']} published"), said)
    if code:
        print(log, flush=True)
    check("nobody holds it", row["holders"] == [], row["holders"])
    check("no process is left", left_behind() == [], left_behind())
    seen = re.findall(r".*(?:for KV cache|Warming up|warming up).*", log)
    check("no KV cache and no warm-up", not seen, seen)
    code, said, _ = preload(model, vault)
    check("again, it is resident already", said == f"{row['id']} was resident already", said)
    disk = stand.start(model=str(model), load_format="auto", extra={})
    hit = stand.start(model=str(model), extra=vault.extra(mode="ipc_cache"))
    check("an engine finds it", stand.words(hit).get("mode") == "ipc_cache", hit["line"])
    tokens = [[token for token, _ in answer] for answer in hit.get("answers", [])]
    check("and answers", len(tokens) == 20 and len(disk["answers"]) == 20)


def check_two(vault: stand.Vault, model: Path) -> None:
    write_random_llama(model, 1 << 28)  # its heads can be shared out, the demo model's nine cannot
    code, said, log = preload(model, vault, "--tensor-parallel-size", "2")
    ranks = [row["key"]["tp_rank"] for row in rows(vault) if row["key"]["tp_size"] == "2"]
    check("two ranks publish", (code, sorted(ranks)) == (0, ["0", "1"]), ranks)
    if code:
        print(log[-6000:], flush=True)
        return
    check("no process is left", left_behind() == [], left_behind())
    with VaultClient(vault.socket) as client:
        gone = next(row["id"] for row in rows(vault) if row["key"]["tp_rank"] == "1")
        client.drop(gone)
    code, said, _ = preload(model, vault, "--tensor-parallel-size", "2")
    words = sorted(line.split(maxsplit=1)[1] for line in said.splitlines())
    check("what is missing is added", words == ["published", "was resident already"], said)


def check_refusals(vault: stand.Vault, model: Path) -> None:
    code, said, _ = preload(model, vault, socket_path="/nowhere.sock")
    check("without a vault it ends with 1", code == 1 and "/nowhere.sock" in said, said)
    code, said, _ = preload(model, vault, "--load-format", "dummy")
    check("dummy weights are refused", code == 1 and "wcache.unsupported" in said, said)
    code, _, log = preload(model, vault, "--no-such-flag")
    check("vLLM's parser has the last word", code == 2 and "--no-such-flag" in log, code)
    code, said, _ = preload(model, vault, "--data-parallel-size", "2")
    check("data parallel engines are refused", code == 1 and "data parallel" in said, said)
    code, said, _ = preload(model.parent / "none", vault)
    check("a model that is not there ends with 1", code == 1, said)


def verify(vault: stand.Vault, *arguments: str) -> tuple[int, str]:
    argv = ["wcache", "--socket", str(vault.socket), "verify", *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    return done.returncode, done.stdout + done.stderr


def check_changed(vault: stand.Vault, model: Path) -> None:
    preload(model, vault)
    preload(model, vault, "--dtype", "float32")
    code, text = verify(vault)
    same = text.count("sound") == text.count("checkpoint: same") == len(rows(vault))
    check("the checkpoint is the same", code == 0 and same, text)
    mine = [row for row in rows(vault) if row["model"] == str(model)]
    before = {row["key"]["dtype"]: row["id"] for row in mine}
    weights = model / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    code, text = verify(vault)
    check("one flipped bit is seen", code == 1 and text.count("CHANGED (content)") == 2, text)
    check("not in memory", verify(vault, "--resident-only")[0] == 0)
    code, _, _ = preload(model, vault)
    ids = {row["id"] for row in rows(vault) if row["model"] == str(model)}
    gone = before["torch.bfloat16"] not in ids and before["torch.float32"] in ids
    check("its successor takes the old one's place", code == 0 and len(ids) == 2 and gone, ids)
    weights.unlink()
    code, text = verify(vault)
    check("a missing checkpoint is no failure", code == 0 and text.count("not found") == 2, text)


if __name__ == "__main__":
    sys.exit(main())
