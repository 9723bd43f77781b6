# SPDX-License-Identifier: Apache-2.0
"""Stands for vLLM's `snapshot create|restore`: an engine of its own behind a barrier, and criu.

As upstream has it: `create` starts an engine in a session of its own whose log lies in the
artifact, has criu kill it, and looks once for processes that are left; `restore` ends when the
restored tree has answered, and that tree is then nobody's child here. Strict about what it needs.
The file FAKE_SNAPSHOT_FILE holds what goes wrong: `create` (its engine ends before it is ready),
`wait` (it never is) or `oracle` (the restored one answers otherwise).
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ORDER = Path(os.environ.get("FAKE_SNAPSHOT_FILE", "/nonexistent"))
VLLM = Path(__file__).with_name("vllm")
OPTIONS = ("--shell-job", "--ext-unix-sk", "--tcp-established", "--link-remap", "--file-locks")
PATIENCE_S = 60.0


class SnapshotError(RuntimeError):
    """Upstream's own errors end its command as a traceback."""


def order() -> str:
    return ORDER.read_text().strip() if ORDER.exists() else ""


def preflight() -> tuple[str, str]:
    criu, plugins = shutil.which("criu"), os.environ.get("CRIU_CUDA_PLUGIN_DIR")
    for command in ("criu", "cuda-checkpoint", "nvidia-smi"):
        if shutil.which(command) is None:
            raise SnapshotError(f"snapshot dependency not found: {command}")
    if not plugins or not Path(plugins, "cuda_plugin.so").is_file():
        raise SnapshotError("CRIU CUDA plugin not found")
    return str(criu), plugins


def criu(action: str, artifact: Path, *more: str) -> None:
    program, plugins = preflight()
    images = ["--images-dir", str(artifact / "images"), "--log-file", f"{action}.log"]
    command = ["env", f"PATH={os.environ['PATH']}", program, action, "-L", plugins]
    subprocess.run([*command, *images, *OPTIONS, *more], check=True, capture_output=True)


def read_tree(root: int) -> list[int]:
    """As upstream: by `ps`, the root first."""
    rows = subprocess.run(["ps", "-eo", "pid=,ppid="], check=True, capture_output=True, text=True)
    pairs = [tuple(map(int, row.split())) for row in rows.stdout.splitlines()]
    found = [root]
    for pid in found:
        found += [child for child, parent in pairs if parent == pid]
    return found


def create(argv: list[str]) -> None:
    at = argv.index("--snapshot-dir")
    artifact, words = Path(argv[at + 1]), argv[:at] + argv[at + 2 :]
    preflight()
    if artifact.exists():
        raise SnapshotError(f"snapshot target already exists: {artifact}")
    mode = artifact.parent.stat().st_mode & 0o777
    if mode != 0o700:
        raise SnapshotError(f"snapshot directory must have mode 0700: {mode:o}")
    artifact.mkdir(mode=0o700)
    server = [sys.executable, str(VLLM), "snapshot", "server"]
    server += ["--ready-file", str(artifact / "ready.json")]
    server += ["--release-file", str(artifact / "release.json"), "--", *words]
    with (artifact / "child.log").open("wb") as log:
        child = subprocess.Popen(server, stdout=log, stderr=log, start_new_session=True)
    published = False
    try:
        while not (artifact / "ready.json").exists():
            if child.poll() is not None:
                text = (artifact / "child.log").read_text()
                raise SnapshotError(f"snapshot child exited before ready:\n{text}")
            time.sleep(0.05)
        tree = read_tree(child.pid)
        (artifact / "images").mkdir(mode=0o700)
        criu("dump", artifact, "--tree", str(child.pid))
        child.wait(10)
        for pid in tree:  # once, and a zombie counts
            if Path(f"/proc/{pid}").exists():
                raise SnapshotError(f"process survived CRIU dump: {pid}")
        manifest = {
            "created_at": "2026-11-30T10:00:00+00:00",
            "artifact_bytes": sum(f.stat().st_size for f in artifact.rglob("*") if f.is_file()),
            "process_tree": tree,
            "engine_argv": words,
            "oracle": json.loads((artifact / "ready.json").read_text()),
        }
        (artifact / "manifest.json").write_text(json.dumps(manifest))
        published = True
    finally:
        if not published:
            child.kill()
            shutil.rmtree(artifact)


def restore(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="vllm snapshot restore", allow_abbrev=False)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args(argv)
    preflight()
    manifest = json.loads((args.artifact / "manifest.json").read_text())
    root = manifest["process_tree"][0]
    if Path(f"/proc/{root}").exists():
        raise SnapshotError(f"captured PID is already occupied: {root}")
    (args.artifact / "release.json").unlink(missing_ok=True)
    criu("restore", args.artifact, "--restore-detached", "--pidfile", f"{args.artifact}/pid")
    release = {"release": True, "host": args.host, "port": args.port}
    (args.artifact / "release.tmp").write_text(json.dumps(release))
    (args.artifact / "release.tmp").rename(args.artifact / "release.json")
    with socket.socket() as probe:
        deadline = time.monotonic() + PATIENCE_S
        while probe.connect_ex((args.host, args.port)):
            if time.monotonic() > deadline or not Path(f"/proc/{root}").exists():
                raise SnapshotError("restored process exited before binding HTTP")
            time.sleep(0.05)
    body = json.dumps({"model": manifest["engine_argv"][0], "prompt": "x"}).encode()
    url = f"http://{args.host}:{args.port}/v1/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=PATIENCE_S) as answer:
        text = json.load(answer)["choices"][0]["text"]
    if text != manifest["oracle"] or order() == "oracle":
        for pid in read_tree(root):
            os.kill(pid, signal.SIGKILL)
        raise SnapshotError("snapshot oracle mismatch")


class Barrier:
    """What `vllm.snapshot.server` waits at: dumped there, and released after a restore."""

    def __init__(self, argv: list[str]) -> None:
        at = argv.index("--")
        self.words = argv[at + 1 :]
        names = dict(zip(argv[:at:2], argv[1:at:2], strict=True))
        self.ready, self.release = Path(names["--ready-file"]), Path(names["--release-file"])
        assert "WARMHOLD_CONTROL_SOCKET" not in os.environ, "it is the engine's of warmhold"
        assert "warmhold" not in os.environ["VLLM_PLUGINS"].split(",")
        assert Path(os.environ["HF_HUB_CACHE"]).is_dir()
        if order() == "create":
            print("ValueError: Free memory on device is less than desired", flush=True)
            sys.exit(1)

    def wait(self) -> tuple[str, int]:
        """Say that it is ready, detach, wait; return host and port."""
        while order() == "wait":
            time.sleep(0.05)
        if not self.ready.exists():
            self.ready.with_suffix(".tmp").write_text(json.dumps(" Paris"))
            self.ready.with_suffix(".tmp").rename(self.ready)
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        while not self.release.exists():
            time.sleep(0.05)
        told = json.loads(self.release.read_text())
        return told["host"], told["port"]


def main(argv: list[str]) -> Barrier:
    """Create or restore, and end; as the engine itself return its barrier."""
    action, rest = argv[0], argv[1:]
    if action == "server":
        return Barrier(rest)
    print(f"snapshot {action} argv " + json.dumps(rest), flush=True)
    {"create": create, "restore": restore}[action](rest)
    sys.exit(0)
