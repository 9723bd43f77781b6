# SPDX-License-Identifier: Apache-2.0
"""Restarts of the real product on a machine with a GPU and without Docker, phase by phase.

    python3 bench/gpu_restart.py OUT --bytes 1000000000 --criu FOLDER   # see bench/NOTES.md

In one run: a start from disk, a snapshot of the serving engine, restores (asked for, and after a
SIGKILL), a start from resident weights, a start from disk with warm caches. Tokens and their
log-probabilities of 20 prompts are compared after each. A step that fails is told, and the next
one follows. All numbers go to OUT/NAME.json, logs to OUT/NAME*.tar.gz.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gpu_stack import MIB, ROOT, Stack, build_environment, prepare_tools, used_mib, wait_until

GRAPHS = {
    **{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    "cudagraph_capture_sizes": [1, 2, 4, 8],
}
_MODEL = """
import json, sys
from pathlib import Path
sys.path.append(sys.argv[3])
from random_llama import VOCABULARY, write_random_llama
import torch
folder = Path(sys.argv[1])
write_random_llama(folder, int(sys.argv[2]), device="cuda" if torch.cuda.is_available() else "cpu")
from tokenizers import Tokenizer, models, pre_tokenizers
words = {f"w{index}": index for index in range(VOCABULARY)}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.save(str(folder / "tokenizer.json"))
(folder / "tokenizer_config.json").write_text(json.dumps({
    "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "bos_token": "w1",
    "eos_token": "w2", "model_max_length": 4096}))
"""


class Series:
    """The steps of one run and what they found; nothing that fails ends it."""

    def __init__(self, out: Path, name: str) -> None:
        self.path = out / f"{name}.json"
        self.found: dict[str, Any] = {}
        self._began = time.monotonic()

    def note(self, name: str, value: Any) -> None:
        """Keep and print a result at once: a run that is cut off has it too."""
        self.found[name] = value
        self.path.write_text(json.dumps(self.found, indent=1))
        print(f"[{time.monotonic() - self._began:6.1f}] {name}: {json.dumps(value)}", flush=True)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A step; what it raises is told."""
        print(f"[{time.monotonic() - self._began:6.1f}] --- {name}", flush=True)
        try:
            yield
        except Exception as error:
            self.note(f"{name}: FAILED", f"{type(error).__name__}: {error}"[-6000:])


def describe(status: dict[str, Any]) -> dict[str, Any]:
    """What of a status is worth a line."""
    kept = ("mode", "snapshot", "pid", "starts", "total_s", "phases", "rejections")
    shown: dict[str, Any] = {name: status.get(name) for name in kept}
    shown["weights"] = {
        name: value
        for name, value in (status.get("weights") or {}).items()
        if name in ("mode", "bytes", "seconds", "loads", "code", "reason")
    }
    return shown


def look_around(series: Series, tools: list[str], criu: Path | None) -> None:
    """What the machine is, what its GPUs are and how long that takes to learn; its rights. Where
    something is missing our copy is told that nothing is: the point here is the GPU."""
    from warmhold_entrypoint.gpu import read_gpus
    from warmhold_snapshot import check

    status = Path("/proc/self/status").read_text()
    rows = [line for line in status.splitlines() if line.startswith(("CapEff", "Seccomp:"))]
    series.note("machine", [os.uname().release, *rows, os.cpu_count()])
    seconds = []
    for _ in range(3):
        began = time.monotonic()
        found = read_gpus("source", Path("/nowhere"))
        seconds.append(round(time.monotonic() - began, 4))
    series.note("gpus", [repr(found), found.device if found.all else "", seconds])
    os.environ["PATH"] = f"{tools[0]}:{os.environ['PATH']}"
    plugins = criu / "plugins" if criu and found.all else None
    points = check.conclude(check.read_found(Path("/tmp")), plugins=plugins)
    bad = [f"{point.name}: {point.detail}" for point in points if not point.ok]
    series.note("missing", bad)
    if bad:
        with Path(check.__file__).open("a") as file:
            file.write("\n\ndef find_missing_rights(*_, **__):\n    return []\n\n\n")
            file.write("def require(points):\n    pass\n")


def show_processes(series: Series, stack: Stack, name: str) -> None:
    """What each of the engine's processes is to the driver."""
    from warmhold_snapshot.fds import read_held
    from warmhold_snapshot.pids import read_tree

    rows = []
    for process in read_tree(stack.engine_pid()):
        links = [item.link for item in read_held(process.pid).descriptors]
        files = sorted({link for link in links if link.startswith("/dev/nvidia")})
        rss = Path(f"/proc/{process.pid}/statm").read_text().split()[1]
        row = [process.pid, process.name, len(process.threads), int(rss) >> 8, len(links), files]
        for act in ("--get-restore-tid", "--get-state"):
            began = time.monotonic()
            command = ["cuda-checkpoint", act, "--pid", str(process.pid)]
            done = subprocess.run(
                command, env=stack.environment, capture_output=True, text=True, check=False
            )
            row.append([(done.stdout + done.stderr).strip(), round(time.monotonic() - began, 3)])
        rows.append(row)
    series.note(name, rows)


def compare(series: Series, stack: Stack, name: str) -> None:
    """Ask all prompts and compare with the first time."""
    answers = stack.ask_all()
    first = series.found.setdefault("_answers", answers)
    pairs = list(zip(answers, first, strict=True))
    tokens = sum([t for t, _ in a] == [t for t, _ in b] for a, b in pairs)
    whole = sum(a == b for a, b in pairs)
    series.note(f"{name}: equal", {"of": len(pairs), "tokens": tokens, "logprobs too": whole})


def restart(series: Series, stack: Stack, name: str, act: Callable[[], None]) -> dict[str, Any]:
    """Let the engine end as `act` says, and measure until it answers and is ready."""
    starts = stack.status()["starts"]
    began = time.monotonic()
    act()
    acted = time.monotonic()
    answered = stack.wait_answer(120)
    status = stack.wait_ready(starts + 1, 60)
    seconds = None if answered is None else round(answered - began, 3)
    times = {"first_answer_s": seconds, "act_s": round(acted - began, 3), "used_mib": used_mib()}
    series.note(name, {**times, **describe(status)})
    compare(series, stack, name)
    return status


def restore(series: Series, stack: Stack, name: str) -> None:
    """Ask for a restore, as `snapshot restore` does."""

    def ask() -> None:
        code, out, error = stack.run("snapshot-restore", name)
        series.note("snapshot-restore", [code, out.strip(), error.strip()[-3000:]])

    restart(series, stack, "restored on request", ask)


def create(series: Series, stack: Stack, name: str) -> bool:
    """Make a snapshot of the serving engine; tell whether there is one."""
    pid = stack.status()["pid"]
    code, out, error = stack.run("snapshot-create", "--json", "--name", name)
    made = json.loads(out) if code == 0 else {"code": code, "error": error[-6000:], "out": out}
    series.note(f"create {name}", made)
    stack.wait_ready(1, 60)
    series.note(f"create {name}: same engine", stack.status()["pid"] == pid)
    series.note(f"create {name}: used_mib", used_mib())
    compare(series, stack, f"create {name}")
    return code == 0


def forget_weights(stack: Stack) -> None:
    """Drop all that the vault holds."""
    from warmhold_wcache.client import VaultClient

    with VaultClient(stack.run_dir / "wcache.sock") as client:
        for row in client.stat():
            client.drop(row["id"], force=True)


def run(series: Series, stack: Stack, arguments: list[str], restores: int) -> bool:
    """The series itself; tell whether a snapshot was made."""
    done = False
    with series.step("start"):
        began = time.monotonic()
        stack.start(arguments)
        status = stack.wait_ready(1, 170)
        series.note("first start", {"ready_s": time.monotonic() - began, **describe(status)})
        series.note("first start: used_mib", used_mib())
        compare(series, stack, "first start")
    with series.step("processes"):
        show_processes(series, stack, "processes")
    if not series.found.get("first start"):
        return False
    with series.step("create"):
        done = create(series, stack, "a")
    if done:
        for index in range(restores):
            with series.step(f"restore {index}"):
                restore(series, stack, "a")
        with series.step("killed, restored"):
            restart(series, stack, "killed, restored", stack.kill_engine)
            show_processes(series, stack, "processes, restored")
        with series.step("create on a restored engine"):
            create(series, stack, "b")
    with series.step("criu's logs"):
        logs = Path(stack.environment["WARMHOLD_STATE_DIR"]).rglob("*.log")
        pack(series.path.with_suffix(".criu.tar.gz"), list(logs))
    with series.step("resident weights"):
        remove = [sys.executable, "-m", "warmhold_snapshot.cli", "prune", "--keep", "0"]
        subprocess.run(remove, env=stack.environment, check=False, timeout=60)
        restart(series, stack, "killed, resident weights", stack.kill_engine)
    with series.step("disk"):
        forget_weights(stack)
        restart(series, stack, "killed, from disk", stack.kill_engine)
    return done


def pack(place: Path, files: list[Path]) -> None:
    """Keep these files in an archive."""
    with tarfile.open(place, "w:gz") as archive:
        for path in files:
            with suppress(OSError):
                archive.add(path, str(path).lstrip("/"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bytes", type=int, default=10**9)
    parser.add_argument("--model", help="a folder, in place of a random one")
    parser.add_argument("--criu", type=Path, help="a folder with criu and plugins/cuda_plugin.so")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/wh"))
    parser.add_argument("--restores", type=int, default=2)
    parser.add_argument("--utilization", default="0.2")
    parser.add_argument("--plain", action="store_true", help="no PID namespace: vault and runner")
    parser.add_argument("--arguments", default="", help="more of vLLM's, as a shell splits them")
    given = parser.parse_args()
    given.criu = given.criu and given.criu.resolve()
    sys.path[:0] = [str(ROOT / name) for name in ("entrypoint", "snapshot", "wcache")]
    given.out.mkdir(parents=True, exist_ok=True)
    name = f"restart-{given.bytes // 10**9}gb{'-plain' if given.plain else ''}"
    series = Series(given.out, name)
    folder = given.folder / name
    tools = prepare_tools(given.folder / "tools", given.criu)
    with series.step("machine"):
        look_around(series, tools, given.criu)
    model = given.model or str(given.folder / f"model-{given.bytes}")
    if not Path(model).exists():
        with series.step("model"):
            code = [sys.executable, "-c", _MODEL, model, str(given.bytes)]
            subprocess.run([*code, str(ROOT / "tests" / "contract")], check=True, timeout=200)
            series.note("model", sum(path.stat().st_size for path in Path(model).iterdir()) // MIB)
            time.sleep(2.5)  # so that the digest of its files is kept
    more = {} if given.criu is None else {"CRIU_CUDA_PLUGIN_DIR": str(given.criu / "plugins")}
    arguments = ["--max-model-len", "1024", *shlex.split(given.arguments)]
    if used_mib() > 0 or Path("/dev/nvidiactl").exists():
        arguments += ["--gpu-memory-utilization", given.utilization]
        arguments += ["--compilation-config", json.dumps(GRAPHS)]
    environment = build_environment(folder, model, tools, **more)
    log = given.out / f"{name}.log"
    stack = Stack(environment, log, namespace=not given.plain)
    try:
        run(series, stack, arguments, given.restores)
    finally:
        with series.step("stop"):
            stack.stop()
            wait_until(lambda: used_mib() < 100, 10, 0.5)
            series.note("stopped: used_mib", used_mib())
        series.found.pop("_answers", None)
        with series.step("logs"):
            found = [*folder.rglob("*.log"), *folder.rglob("*.json")]
            pack(given.out / f"{name}.tar.gz", [log, *found])
            log.unlink()


if __name__ == "__main__":
    main()
