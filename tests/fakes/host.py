# SPDX-License-Identifier: Apache-2.0
"""Strict fakes of the host's commands (`docker`, `apt-get`, `debootstrap`, ...) for docker/host.sh.

Called as `host.py NAME ARGUMENTS...`. The folder FAKE_DIR holds `state.json` (what the host is
like) and `calls.jsonl` (what was asked of it). Arguments that host.sh should not pass end with 64.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

DIR = Path(os.environ.get("FAKE_DIR", "."))
ROOT = Path(os.environ.get("HOST_ROOT", "."))
CALLS = DIR / "calls.jsonl"
SEEN_ENVIRONMENT = ("WARMHOLD_WHEELS", "WARMHOLD_CA_BUNDLE", "DEBIAN_FRONTEND", "YES")


def load() -> dict[str, Any]:
    return json.loads((DIR / "state.json").read_text())


def save(**changes: Any) -> None:
    new = DIR / f"state.{os.getpid()}"
    new.write_text(json.dumps(load() | changes))
    new.replace(DIR / "state.json")


def refuse(name: str, args: list[str]) -> int:
    print(f"fake {name}: unexpected arguments {args}", file=sys.stderr)
    return 64


def install_docker(path: Path, plugins: str) -> None:
    """Given a path and the plug-ins, put a fake client there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"#!/bin/sh\nexport FAKE_PLUGINS='{plugins}'\n"
        f'exec {sys.executable} -I -S {__file__} docker "$@"\n'
    )
    path.chmod(0o755)


def install_program(name: str) -> None:
    """Given a name, put a fake of it on PATH."""
    path = DIR / "bin" / name
    path.unlink(missing_ok=True)
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {__file__} {name} "$@"\n')
    path.chmod(0o755)


def docker(args: list[str]) -> int:
    state, plugins = load(), os.environ["FAKE_PLUGINS"].split()
    match args:
        case ["compose" | "buildx" as plugin, "version"]:
            return 0 if plugin in plugins else 1
        case ["version", "--format", "{{.Server.Version}}"]:
            print(state["server"] or state["refusal"])
            return 0 if state["server"] else 1
        case ["context", "show"]:
            print(state["context"])
        case ["image", "inspect", image]:
            return 0 if image in state["images"] else 1
        case ["pull", image]:
            if not state["registry"]:
                print("no such host", file=sys.stderr)
                return 1
            save(images=[*state["images"], image])
        case ["import", "--change", 'CMD ["bash"]', "-", image]:
            (DIR / "imported.tar").write_bytes(sys.stdin.buffer.read())
            save(images=[*state["images"], image])
        case ["ps", "--filter", filter_, "--format", "container {{.Names}}"]:
            if state["publishes"] and filter_ == f"publish={state['publishes']}":
                print("container somebody-else")
        case ["inspect", "--format", format_, "c1"]:
            keys = ("{{.Id}}", "{{.State.Status}}", "{{.RestartCount}}", "{{.State.ExitCode}}")
            health = "{{with .State.Health}}{{.Status}}{{end}}"
            if format_.split(" ", 5) != [*keys, "{{.State.StartedAt}}", health]:
                return refuse("docker", args)
            print(*state["container"])
        case ["logs", "--follow", "--since", _, "c1"] | ["logs", "--tail", "400", "c1"]:
            print(state["log"])
        case ["compose", *rest] if "compose" in plugins:
            return compose(rest)
        case _:
            return refuse("docker", args)
    return 0


def compose(args: list[str]) -> int:
    state = load()
    match args:
        case ["port", "warmhold", "8000"]:
            if not state["port"]:
                return 1
            print(state["port"])
        case ["ps", "--all", "--quiet", "warmhold"]:
            if state["container"]:
                print("c1")
        case ["up", "--build", "--wait"]:
            return up(state["scenario"])
        case ["build"] | ["down"] | ["down", "--volumes"] | ["logs", "--follow", "--tail", "200"]:
            pass
        case _:
            return refuse("docker compose", args)
    return 0


def up(scenario: str) -> int:
    """Given what is to happen, play it; wait for what host.sh must do, not for time."""
    now = time.strftime("%Y-%m-%dT%H:%M:%S.999999999Z", time.gmtime())
    match scenario:
        case "ready":
            save(container=["c1", "running", "0", "0", now, "starting"])
            if not await_call("logs", "--follow"):
                return 1
            save(container=["c1", "running", "0", "0", now, "healthy"], port="127.0.0.1:8000")
            return 0
        case "restarts":  # the real one waits on: host.sh has to end this process
            save(container=["c1", "running", "1", "78", now, "starting"])
            time.sleep(600)
            return 0
        case "unhealthy":
            save(container=["c1", "running", "0", "0", now, "unhealthy"])
            return 1
        case "build fails":
            print("failed to solve", file=sys.stderr)
            return 17
    return refuse("up", [scenario])


def await_call(*words: str) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if any(set(words) <= set(json.loads(line)["args"]) for line in CALLS.open()):
            return True
        time.sleep(0.02)
    return False


def apt_get(args: list[str]) -> int:
    state = load()
    match args:
        case ["update"]:
            return 100 if state["apt_update_fails"] else 0
        case [
            "install",
            "-y",
            "--no-install-recommends",
            "-o",
            "DPkg::Lock::Timeout=120",
            *packages,
        ]:
            if state["apt_install_fails"] or os.environ.get("DEBIAN_FRONTEND") != "noninteractive":
                return 100
        case _:
            return refuse("apt-get", args)
    save(installed=[*state["installed"], *packages])
    if "docker.io" in packages:
        names = {
            "docker-buildx": "buildx",
            "docker-compose": "compose",
            "docker-compose-v2": "compose",
        }
        install_docker(ROOT / "usr/bin/docker", " ".join(names[p] for p in packages if p in names))
        install_program("dockerd")
    if "debootstrap" in packages:
        install_program("debootstrap")
    return 0


def start_docker(expected: list[str], args: list[str]) -> int:
    if args != expected:
        return refuse("start", args)
    if load()["dockerd_fails"]:
        print("dockerd: no iptables here", file=sys.stderr)
        return 1
    save(server="26.1.5")
    return 0


def debootstrap(args: list[str]) -> int:
    match args:
        case ["--force-check-gpg", "--variant=minbase", "bookworm", target, _mirror]:
            for folder in ("etc/apt", "bin", "var/cache/apt/archives", "var/lib/apt/lists"):
                (Path(target) / folder).mkdir(parents=True)
            for name in ("bin/sh", "var/cache/apt/archives/x.deb", "var/lib/apt/lists/x"):
                (Path(target) / name).write_text("x")
            return 0
    return refuse("debootstrap", args)


def main(name: str, args: list[str]) -> int:
    """Given a command's name and arguments, record the call and act as that command."""
    call = {"name": name, "args": args, "env": {k: os.environ.get(k) for k in SEEN_ENVIRONMENT}}
    with CALLS.open("a") as calls:
        calls.write(json.dumps(call) + "\n")
    match name, args:
        case "docker", _:
            return docker(args)
        case "apt-get", _:
            return apt_get(args)
        case "debootstrap", _:
            return debootstrap(args)
        case "dockerd", _:
            return start_docker([], args)
        case "systemctl", _:
            return start_docker(["start", "docker"], args)
        case "service", _:
            return start_docker(["docker", "start"], args)
        case "id", ["-u"]:
            print(os.environ.get("FAKE_UID", "0"))
        case "id", ["-un"]:
            print("someone")
        case "sudo", _:
            os.environ["FAKE_UID"] = "0"
            os.execvp(args[0], args)  # noqa: S606
        case "sleep", ["1"]:
            pass
        case "ss", ["-ltnpH", _]:
            print('LISTEN 0 5 127.0.0.1:1 0.0.0.0:* users:(("squatter",pid=42,fd=3))')
        case "python3", ["-m", "pip", "config", "list"]:
            print(load()["pip_config"])
        case "python3", ["-c", _]:
            return 0 if "python3-venv" in load()["installed"] else 1
        case "probe", _:  # a command given to `host.sh run`
            os.execvp("docker", ["docker", *args])  # noqa: S606
        case _:
            return refuse(name, args)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
