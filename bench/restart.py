# SPDX-License-Identifier: Apache-2.0
r"""How long a restart takes, by mode: from `supervisorctl start engine` to the first token.

    python3 bench/restart.py [--image warmhold:cpu] [--rounds 5] [--cold 5] [-- ENGINE ARGUMENTS]

One container with the rights for snapshots, nothing else running: disk with empty compile caches,
disk with warm ones, ipc_cache, snapshot; each so many times, medians and all single values. Each
round stops the engine first, which is not part of the time. The weight file is in the page cache.
Standard library only; talks to `docker` and to the container's port.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress

RIGHTS = [f"--cap-add={name}" for name in ("SYS_ADMIN", "SYS_PTRACE", "NET_ADMIN", "SYS_TIME")]
NAME = "warmhold-bench-restart"
QUESTION = {"model": "demo", "prompt": "The capital of France is", "max_tokens": 1}
LIMIT_S = 900.0


def docker(*argv: str) -> str:
    done = subprocess.run(["docker", *argv], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"docker {' '.join(argv)}: {done.stdout}{done.stderr}")
    return done.stdout.strip()


def inside(*argv: str) -> str:
    return docker("exec", NAME, *argv)


def wait_for_token(port: str) -> None:
    """Ask until one comes; a refused connection costs nothing, and is tried again at once."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(QUESTION).encode(),
        {"Content-Type": "application/json"},
    )
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        with suppress(OSError), urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            if json.load(answer)["choices"]:
                return
        time.sleep(0.01)
    raise RuntimeError(docker("logs", "--tail", "50", NAME))


def start(port: str, mode: str) -> float:
    """Start the stopped engine; return the seconds to its first token. Fail in any other mode."""
    began = time.monotonic()
    starting = subprocess.Popen(
        ["docker", "exec", NAME, "supervisorctl", "start", "engine"], stdout=subprocess.DEVNULL
    )
    wait_for_token(port)
    seconds = time.monotonic() - began
    starting.wait(LIMIT_S)
    status = json.loads(inside("warmhold", "status", "--json"))
    if status["mode"] != mode:
        raise RuntimeError(f"{mode} was wanted, it is {status['mode']}: {status['rejections']}")
    phases = {name: round(value, 2) for name, value in status["phases"].items()}
    print(f"  {mode}: {seconds:.2f} s {phases}", flush=True)
    return seconds


def drop_weights() -> None:
    for row in json.loads(inside("wcache", "status", "--json")):
        inside("wcache", "drop", row["id"], "--force")


def drop_caches() -> None:
    inside("sh", "-c", "rm -rf /var/lib/warmhold/cache/*/[!h]*")  # all but the folder `home`


def measure(port: str, rounds: int, cold: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    prepare: dict[str, tuple[Callable[[], None], ...]] = {
        "disk, cold caches": (drop_weights, drop_caches),
        "disk, warm caches": (drop_weights,),
        "ipc_cache": (),
        "snapshot": (),
    }
    for name, acts in prepare.items():
        print(name, flush=True)
        if name == "snapshot":
            print(inside("snapshot", "create"), flush=True)
        for _ in range(cold if drop_caches in acts else rounds):
            inside("supervisorctl", "stop", "engine")
            for act in acts:
                act()
            found.setdefault(name, []).append(start(port, name.partition(",")[0]))
    return found


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--image", default="warmhold:cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", type=int, default=5, help="rounds with empty compile caches")
    parser.add_argument("engine", nargs="*")
    options = parser.parse_args(arguments)
    run = ["run", "-d", "--name", NAME, "--shm-size", "1g", "--security-opt", "seccomp=unconfined"]
    environment = ["-e", "WARMHOLD_SNAPSHOT=manual", "-e", "WARMHOLD_KV_CACHE_GIB=1"]
    docker(*run, *RIGHTS, *environment, "-p", "127.0.0.1::8000", options.image, *options.engine)
    try:
        port = docker("port", NAME, "8000/tcp").rpartition(":")[2]
        wait_for_token(port)
        found = measure(port, options.rounds, options.cold)
    finally:
        docker("rm", "--force", "--volumes", NAME)
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    for name, seconds in medians.items():
        row = ", ".join(f"{value:.2f}" for value in found[name])
        print(f"{name:18} median {seconds:7.2f} s   ({row})")
    for name in list(medians)[:-1]:
        print(f"snapshot is {medians[name] / medians['snapshot']:.1f} x faster than {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
