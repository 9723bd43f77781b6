# SPDX-License-Identifier: Apache-2.0
r"""The benchmark of `make bench`: restarts by mode, and how they grow; and the guard of CI.

    python3 bench/run.py OUT [--image warmhold:cpu] [--rounds 3] [--sizes 250,500,1000,2000]
    python3 bench/run.py OUT --guard

Starts containers of the image, one after the other, runs `warmhold bench` in each, and collects
what it writes in OUT. The guard has two rounds of an eager engine and looks at ratios alone: it
ends with 1 where a snapshot is not even 8 times faster than the disk, or a hit's weight phase takes
more than a fifth of the disk's. Standard library only; talks to `docker`.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NAME = "warmhold-bench"
RIGHTS = [f"--cap-add={name}" for name in ("SYS_ADMIN", "SYS_PTRACE", "NET_ADMIN", "SYS_TIME")]
RIGHTS += ["--security-opt", "seccomp=unconfined", "--shm-size", "1g"]
KV_GIB = 1
START_S = 900  # a first start compiles everything
LEAST_SPEEDUP, MOST_SHARE = 8.0, 0.2
MAKE_MODEL = """
import sys
from pathlib import Path
sys.path.append("/contract")
from random_llama import write_random_llama, write_tokenizer
folder = Path("/models") / sys.argv[1]
write_random_llama(folder, int(sys.argv[2]))
write_tokenizer(folder)
"""
VALIDATE = """
import json, sys
from pathlib import Path
import jsonschema
schema = json.loads(Path("/schema.json").read_text())
for path in map(Path, sys.argv[1:]):
    jsonschema.validate(json.loads(path.read_text()), schema[path.stem.partition("-")[0]])
    print(f"{path.name}: valid")
"""


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:6.0f} s] {text}", flush=True)


def docker(*argv: str, show: bool = False) -> str:
    """Run docker; with `show` its output goes on as it comes. Raise RuntimeError where it fails."""
    done = subprocess.run(
        ["docker", *argv], stdout=None if show else subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"docker {' '.join(argv)}: exit code {done.returncode}: {done.stdout}")
    return (done.stdout or "").strip()


def wait_healthy() -> None:
    """Wait until the container serves; raise RuntimeError where it ended, or takes too long."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        state = docker("inspect", "--format", "{{.State.Status}} {{.State.Health.Status}}", NAME)
        if state == "running healthy":
            return
        if not state.startswith("running"):
            raise RuntimeError(f"the container does not run: {state}")
        time.sleep(1)
    raise RuntimeError(f"the container does not serve after {START_S} s")


class Bench:
    """One benchmark. Owns a volume of models, and one container at a time."""

    def __init__(self, image: str, out: Path) -> None:
        self.image = image
        self.out = out

    def mount(self, *pairs: tuple[Path, str]) -> list[str]:
        return [f"--volume={path.resolve()}:{inside}:ro" for path, inside in pairs]

    @contextmanager
    def container(self, *arguments: str, model: str = "demo") -> Iterator[None]:
        """A container that serves while it lasts; its volumes go with it."""
        environment = [f"--env=WARMHOLD_KV_CACHE_GIB={KV_GIB}", "--env=WARMHOLD_SNAPSHOT=manual"]
        environment += [f"--env=WARMHOLD_MODEL={model}", f"--volume={NAME}:/models"]
        docker("run", "-d", "--name", NAME, *RIGHTS, *environment, self.image, *arguments)
        try:
            wait_healthy()
            yield
        except BaseException:
            docker("logs", "--tail", "60", NAME, show=True)
            raise
        finally:
            docker("rm", "--force", "--volumes", NAME)

    def measure(self, name: str, *options: str) -> Path:
        """Run `warmhold bench` in the container; return the JSON's path in OUT."""
        done = subprocess.run(
            ["docker", "exec", NAME, "warmhold", "bench", "--out", "/tmp/bench", *options],
            check=False,
        )
        if done.returncode not in (0, 1):  # with 1 a row did not prove itself: it is in the result
            raise RuntimeError(f"warmhold bench: exit code {done.returncode}")
        for kind in ("json", "svg", "png"):
            path = self.out / f"{name}.{kind}"
            docker("cp", f"{NAME}:/tmp/bench/bench.{kind}", str(path))
        return self.out / f"{name}.json"

    def measure_size(self, megabytes: int) -> Path:
        """One size of a random model, eager: a start in each mode."""
        say(f"a random model of {megabytes} MB")
        model, contract = f"random-{megabytes}", self.mount((ROOT / "tests/contract", "/contract"))
        make = ["--entrypoint=python", self.image, "-c", MAKE_MODEL]
        volume = f"--volume={NAME}:/models"
        docker("run", "--rm", volume, *contract, *make, model, str(megabytes * 1_000_000))
        with self.container("--enforce-eager", model=f"/models/{model}"):
            return self.measure(f"bench-{megabytes}mb", "--rounds", "1")

    def measure_images(self, path: Path) -> None:
        """Restores of a plain process, by bytes."""
        say("restores of a plain process, by bytes")
        mounts = self.mount((ROOT / "bench", "/bench"))
        run = ["run", "--rm", *RIGHTS, *mounts, "--entrypoint=python", self.image]
        path.write_text(docker(*run, "/bench/restore_bytes.py") + "\n")

    def draw_scaling(self, images: Path, results: Sequence[Path]) -> None:
        names = [f"/out/{path.name}" for path in (images, *results)]
        run = ["run", "--rm", f"--volume={self.out.resolve()}:/out", "--entrypoint=python"]
        docker(*run, self.image, "-m", "warmhold_entrypoint.bench.scaling", "/out", *names)

    def validate(self, results: Sequence[Path]) -> None:
        mounts = self.mount((ROOT / "bench/schema.json", "/schema.json"), (self.out, "/out"))
        run = ["run", "--rm", *mounts, "--entrypoint=python", self.image, "-c", VALIDATE]
        docker(*run, *[f"/out/{path.name}" for path in results], show=True)


def run_all(bench: Bench, rounds: int, sizes: Sequence[int]) -> None:
    say("the demo model, compiled: the first start compiles everything and is not counted")
    with bench.container():
        main = bench.measure("bench", "--rounds", str(rounds), "--cold", "1", "--peer", "1")
    results = [bench.measure_size(megabytes) for megabytes in sizes]
    images = bench.out / "images.json"
    bench.measure_images(images)
    bench.draw_scaling(images, results)
    bench.validate([main, *results, bench.out / "scaling.json"])
    say(f"done: {', '.join(str(path) for path in sorted(bench.out.glob('*.png')))}")


def run_guard(bench: Bench) -> bool:
    """Two rounds, eager; tell whether the ratios hold, of the better start in each mode."""
    with bench.container("--enforce-eager"):
        found = json.loads(bench.measure("guard", "--rounds", "2").read_text())
    starts = [start for start in found["starts"] if not start["faults"]]
    missing = {"disk", "ipc_cache", "snapshot"} - {start["name"] for start in starts}
    if missing:
        say(f"guard: no start that proved itself: {', '.join(sorted(missing))}")
        return False

    def best(mode: str, read: Callable[[dict[str, Any]], float]) -> float:
        return min(read(start) for start in starts if start["name"] == mode)

    speedup = best("disk", _first_token_s) / best("snapshot", _first_token_s)
    share = best("ipc_cache", _weights_s) / best("disk", _weights_s)
    say(f"guard: snapshot {speedup:.1f} times faster than disk (at least {LEAST_SPEEDUP:.0f})")
    say(f"guard: a hit's weight phase is {share:.1%} of disk's (at most {MOST_SHARE:.0%})")
    return speedup >= LEAST_SPEEDUP and share <= MOST_SHARE


def _first_token_s(start: dict[str, Any]) -> float:
    return float(start["first_token_s"])


def _weights_s(start: dict[str, Any]) -> float:
    return float(start["proof"]["weights_s"])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--image", default="warmhold:cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", default="250,500,1000,2000", help="of random models, in MB")
    parser.add_argument("--guard", action="store_true", help="ratios of two eager rounds alone")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(options.image, options.out)
    try:
        if options.guard:
            return 0 if run_guard(bench) else 1
        run_all(bench, options.rounds, [int(size) for size in options.sizes.split(",")])
    finally:
        subprocess.run(["docker", "volume", "rm", "--force", NAME], check=False)
    return 0


BEGAN = time.monotonic()

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
