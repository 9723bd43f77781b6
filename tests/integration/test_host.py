# SPDX-License-Identifier: Apache-2.0
"""docker/host.sh against strict fakes: what it asks for, leaves alone and says."""

import json
import os
import pty
import shutil
import socket
import subprocess
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fakes import host as fakes

REPOSITORY = Path(__file__).resolve().parents[2]
REAL = [
    "awk",
    "bash",
    "cat",
    "chmod",
    "date",
    "dirname",
    "echo",
    "env",
    "grep",
    "head",
    "install",
    "ln",
    "make",
    "mktemp",
    "printenv",
    "rm",
    "sed",
    "setsid",
    "sh",
    "stat",
    "tail",
    "tar",
    "tee",
    "timeout",
    "tr",
]
FAKE = ["apt-get", "id", "python3", "sleep", "ss"]
BOTH = "compose buildx"
FOUR = ["docker.io", "docker-cli", "docker-buildx", "docker-compose"]
DEBIAN_12 = 'ID=debian\nVERSION_ID="12"\n'
PREFERENCES = """\
Package: *
Pin: release n=trixie
Pin-Priority: 50

Package: docker.io docker-cli docker-buildx docker-compose
Pin: release n=trixie
Pin-Priority: 700
"""
SOURCES = """\
Types: deb
URIs: http://deb.debian.org/debian
Suites: trixie
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""


@dataclass
class Host:
    """A machine in a folder: a root for files, a PATH of fakes, a project with host.sh."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root, self.bin, self.project = (self.folder / n for n in ("root", "bin", "project"))
        for path in (
            self.bin,
            self.project / "docker",
            self.root / "proc/1",
            self.root / "var/log",
        ):
            path.mkdir(parents=True)
        for path in ("etc/apt/preferences.d", "etc/apt/sources.list.d", "var/tmp", "usr/sbin"):
            (self.root / path).mkdir(parents=True)
        shutil.copy(REPOSITORY / "docker/host.sh", self.project / "docker")
        self.write("proc/1/comm", "bash\n")
        self.write("etc/os-release", DEBIAN_12)
        for name in REAL:
            (self.bin / name).symlink_to(shutil.which(name) or pytest.fail(f"{name} is missing"))
        self.env = {
            "PATH": str(self.bin),
            "HOST_ROOT": str(self.root),
            "FAKE_DIR": str(self.folder),
            "LC_ALL": "C",
        }
        self.state(
            server=None,
            refusal="Cannot connect to the Docker daemon",
            context="default",
            images=["debian:bookworm-slim"],
            registry=False,
            publishes=None,
            port=None,
            container=[],
            log="a line of the engine's log",
            scenario="ready",
            installed=[],
            apt_update_fails=False,
            apt_install_fails=False,
            dockerd_fails=False,
            pip_config="",
        )
        self.fake(*FAKE)

    def write(self, path: str, text: str) -> Path:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)
        return self.root / path

    def state(self, **changes: Any) -> None:
        file = self.folder / "state.json"
        old = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(old | changes))

    def fake(self, *names: str) -> None:
        for name in names:
            fakes.install_program(name)

    def engine(self, plugins: str = BOTH) -> None:
        """A Docker Engine that answers."""
        fakes.install_docker(self.bin / "docker", plugins)
        self.state(server="26.1.5")

    def run(self, *args: str, stdin: int = subprocess.DEVNULL, **env: str) -> "Result":
        done = subprocess.run(
            ["bash", str(self.project / "docker/host.sh"), *args],
            env=self.env | env,
            stdin=stdin,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def calls(self, name: str) -> list[list[str]]:
        return [call["args"] for call in self.records() if call["name"] == name]

    def records(self) -> list[dict[str, Any]]:
        file = self.folder / "calls.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def apt_files(self) -> dict[str, str]:
        return {p.name: p.read_text() for p in (self.root / "etc/apt").rglob("*") if p.is_file()}


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    def failed_with(self, error: str, fix: str) -> None:
        """Check for a failure whose last two lines are an error and its fix."""
        lines = self.err.splitlines()
        assert self.code == 1, (self.code, self.out, self.err)
        assert lines[-2].startswith("error: ") and error in lines[-2], lines
        assert lines[-1].startswith("fix: ") and fix in lines[-1], lines

    def succeeded(self) -> None:
        assert self.code == 0, (self.out, self.err)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(fakes, "DIR", tmp_path)
    monkeypatch.setattr(fakes, "ROOT", tmp_path / "root")
    return Host(tmp_path)


# --- Docker Engine


def test_an_engine_that_answers_is_left_alone(host: Host) -> None:
    host.engine()
    result = host.run("prepare", YES="1")
    result.succeeded()
    assert "Docker Engine 26.1.5 answers" in result.out
    assert not host.calls("apt-get")
    assert not host.apt_files()


def test_the_client_with_both_plugins_is_chosen(host: Host) -> None:
    host.engine(plugins="compose")
    fakes.install_docker(host.root / "usr/bin/docker", BOTH)
    result = host.run("prepare")
    result.succeeded()
    assert f"client: {host.root}/usr/bin/docker" in result.out


def test_of_two_good_clients_the_first_on_path_is_chosen(host: Host) -> None:
    host.engine()
    fakes.install_docker(host.root / "usr/bin/docker", BOTH)
    assert f"client: {host.bin}/docker" in host.run("prepare").out


@pytest.mark.parametrize(("has", "lacks"), [("compose", "buildx"), ("buildx", "compose")])
def test_a_missing_plugin_is_named_and_nothing_is_installed(
    host: Host, has: str, lacks: str
) -> None:
    host.engine(plugins=has)
    host.run("prepare", YES="1").failed_with(
        f"lacks the plug-in: {lacks}", f"docker-{lacks}-plugin"
    )
    assert not host.calls("apt-get")


def test_docker_host_without_answer_is_an_error(host: Host) -> None:
    fakes.install_docker(host.bin / "docker", BOTH)
    result = host.run("prepare", YES="1", DOCKER_HOST="tcp://192.0.2.1:2375")
    result.failed_with("tcp://192.0.2.1:2375", "unset DOCKER_HOST")
    assert not host.calls("apt-get")


def test_another_context_without_answer_is_an_error(host: Host) -> None:
    fakes.install_docker(host.bin / "docker", BOTH)
    host.state(context="rootless")
    host.run("prepare", YES="1").failed_with("context rootless", "docker context use default")
    assert not host.calls("apt-get")


def test_an_engine_that_refuses_this_user_is_not_installed_over(host: Host) -> None:
    fakes.install_docker(host.bin / "docker", BOTH)
    host.state(refusal="permission denied while trying to connect")
    host.run("prepare", YES="1").failed_with("may not use", "usermod -aG docker someone")
    assert not host.calls("apt-get")


@pytest.mark.parametrize(
    ("comm", "systemd", "started_by"),
    [("bash", False, "dockerd"), ("init", False, "service"), ("systemd", True, "systemctl")],
)
def test_an_installed_engine_is_started(
    host: Host, comm: str, systemd: bool, started_by: str
) -> None:
    fakes.install_docker(host.bin / "docker", BOTH)
    host.fake("dockerd", "service", "systemctl")
    host.write("proc/1/comm", comm + "\n")
    if systemd:
        (host.root / "run/systemd/system").mkdir(parents=True)
    host.run("prepare").succeeded()
    starters = {c["name"] for c in host.records()} & {"dockerd", "service", "systemctl"}
    assert starters == {started_by}
    assert not host.calls("apt-get")


def test_an_engine_that_does_not_come_up_shows_its_log(host: Host) -> None:
    fakes.install_docker(host.bin / "docker", BOTH)
    host.fake("dockerd")
    host.state(dockerd_fails=True)
    result = host.run("prepare")
    result.failed_with("does not answer after 60 s", "dockerd.log")
    assert "dockerd: no iptables here" in result.err
    assert "waiting for the Docker Engine (55 of 60 s)" in result.out


# --- installing it


def test_nothing_is_installed_without_consent(host: Host) -> None:
    host.run("prepare").failed_with(
        "docker.io docker-cli docker-buildx docker-compose", "YES=1 make"
    )
    assert not host.calls("apt-get")
    assert not host.apt_files()


@pytest.mark.parametrize(("reply", "installs"), [("y\n", True), ("n\n", False), ("\n", False)])
def test_a_terminal_is_asked(host: Host, reply: str, installs: bool) -> None:
    ours, theirs = pty.openpty()
    try:
        os.write(ours, reply.encode())
        result = host.run("prepare", stdin=theirs)
    finally:
        os.close(ours)
        os.close(theirs)
    assert bool(host.calls("apt-get")) == installs
    if installs:
        result.succeeded()
    else:
        assert result.code == 1
        assert "error: not installed: docker.io" in result.err


def test_debian_12_takes_four_packages_from_debian_13(host: Host) -> None:
    host.run("prepare", YES="1").succeeded()
    assert host.apt_files() == {"warmhold-trixie": PREFERENCES, "warmhold-trixie.sources": SOURCES}
    assert [call[-5:] for call in host.calls("apt-get")[1:]] == [[*FOUR, "iptables"]]
    assert host.calls("dockerd") == [[]]


def test_installing_again_leaves_the_same_files(host: Host) -> None:
    host.run("prepare", YES="1").succeeded()
    before = host.apt_files()
    (host.bin / "dockerd").unlink()
    (host.root / "usr/bin/docker").unlink()
    host.state(server=None)
    host.run("prepare", YES="1").succeeded()
    assert host.apt_files() == before


@pytest.mark.parametrize(
    ("release", "packages"),
    [
        ("ID=debian\nVERSION_ID=13\n", FOUR),
        ("ID=debian\nVERSION_CODENAME=forky\n", FOUR),
        ("ID=ubuntu\nVERSION_ID=24.04\n", ["docker.io", "docker-buildx", "docker-compose-v2"]),
    ],
)
def test_newer_systems_use_their_own_packages(
    host: Host, release: str, packages: list[str]
) -> None:
    host.write("etc/os-release", release)
    host.run("prepare", YES="1").succeeded()
    assert host.calls("apt-get")[1][5:] == [*packages, "iptables"]
    assert not host.apt_files()


@pytest.mark.parametrize("release", ["ID=fedora\nVERSION_ID=43\n", "ID=debian\nVERSION_ID=11\n"])
def test_other_systems_are_told_what_to_install(host: Host, release: str) -> None:
    host.write("etc/os-release", release)
    host.run("prepare", YES="1").failed_with("can't set one up", "compose and buildx plug-ins")
    assert not host.calls("apt-get")


def test_a_broken_third_party_source_does_not_stop_the_install(host: Host) -> None:
    host.state(apt_update_fails=True)
    result = host.run("prepare", YES="1")
    result.succeeded()
    assert "note: apt-get update had faults" in result.out


def test_a_failed_install_is_an_error(host: Host) -> None:
    host.state(apt_install_fails=True)
    host.run("prepare", YES="1").failed_with("apt-get could not install: docker.io", "make prepare")


def test_installing_needs_root_or_sudo(host: Host) -> None:
    result = host.run("prepare", YES="1", FAKE_UID="1000")
    result.failed_with("needs root", "run it as root")
    host.fake("sudo")
    host.run("prepare", YES="1", FAKE_UID="1000").succeeded()
    assert host.calls("sudo")


# --- base image


def test_a_base_image_that_is_here_is_used(host: Host) -> None:
    host.engine()
    host.run("prepare").succeeded()
    assert ["pull", "debian:bookworm-slim"] not in host.calls("docker")


def test_the_base_image_is_pulled(host: Host) -> None:
    host.engine()
    host.state(images=[], registry=True)
    host.run("prepare").succeeded()
    assert ["pull", "debian:bookworm-slim"] in host.calls("docker")
    assert not host.calls("apt-get")


def test_without_a_registry_the_base_image_is_built(host: Host) -> None:
    host.engine()
    host.state(images=[])
    host.run("prepare").failed_with("debootstrap debian-archive-keyring", "YES=1 make prepare")
    host.run("prepare", YES="1").succeeded()
    with tarfile.open(host.folder / "imported.tar") as image:
        names = image.getnames()
        sources = image.extractfile("./etc/apt/sources.list").read().decode()  # type: ignore[union-attr]
    assert "./bin/sh" in names
    assert not [name for name in names if name.endswith("/x") or name.endswith(".deb")]
    assert sources.splitlines() == [
        "deb http://deb.debian.org/debian bookworm main",
        "deb http://deb.debian.org/debian bookworm-updates main",
        "deb http://deb.debian.org/debian-security bookworm-security main",
    ]
    assert not list((host.root / "var/tmp").iterdir())


def test_debootstrap_is_not_installed_twice(host: Host) -> None:
    host.engine()
    host.state(images=[])
    host.fake("debootstrap")
    host.write("usr/share/keyrings/debian-archive-keyring.gpg", "")
    host.run("prepare", WARMHOLD_DEBIAN_MIRROR="http://mirror.example/debian").succeeded()
    assert not host.calls("apt-get")
    assert host.calls("debootstrap")[0][-1] == "http://mirror.example/debian"


# --- what the build reads from the host


def build_environment(host: Host, **env: str) -> dict[str, str | None]:
    host.engine()
    host.run("image", **env).succeeded()
    return next(call["env"] for call in host.records() if call["args"] == ["compose", "build"])


@pytest.mark.parametrize("by", ["environment", "pip"])
def test_pip_s_folder_of_wheels_is_handed_to_the_build(host: Host, by: str) -> None:
    wheels = host.folder / "wheels"
    wheels.mkdir()
    (wheels / "torch-9.9.9+cpu-cp311-cp311-linux_x86_64.whl").touch()
    host.state(pip_config=f"global.find-links='file:///nowhere\\n{wheels}'" if by == "pip" else "")
    env = {"PIP_FIND_LINKS": str(wheels)} if by == "environment" else {}
    assert build_environment(host, **env)["WARMHOLD_WHEELS"] == str(wheels)


def test_a_folder_without_torch_for_cpus_is_not(host: Host) -> None:
    (host.folder / "torch-9.9.9-cp311-cp311-linux_x86_64.whl").touch()
    assert build_environment(host, PIP_FIND_LINKS=str(host.folder))["WARMHOLD_WHEELS"] is None


def test_wheels_named_in_env_file_win(host: Host) -> None:
    (host.folder / "torch-9.9.9+cpu-cp311-cp311-linux_x86_64.whl").touch()
    (host.project / ".env").write_text("WARMHOLD_WHEELS='./mine'\n")
    assert build_environment(host, PIP_FIND_LINKS=str(host.folder))["WARMHOLD_WHEELS"] is None


def test_the_host_s_ca_bundle_is_handed_to_the_build(host: Host) -> None:
    bundle = host.write("etc/ssl/certs/ca-certificates.crt", "certificates")
    assert build_environment(host)["WARMHOLD_CA_BUNDLE"] == str(bundle)


def test_a_ca_bundle_too_large_for_a_secret_is_passed_over(host: Host) -> None:
    large = host.write("large.pem", "x" * (500 * 1024 + 1))
    fits = host.write("fits.pem", "x" * (500 * 1024))
    env = {"SSL_CERT_FILE": str(large), "PIP_CERT": str(fits)}
    assert build_environment(host, **env)["WARMHOLD_CA_BUNDLE"] == str(fits)
    assert "note: " in host.run("prepare", **env).out


def test_a_named_ca_bundle_is_kept(host: Host) -> None:
    host.write("etc/ssl/certs/ca-certificates.crt", "certificates")
    assert build_environment(host, WARMHOLD_CA_BUNDLE="/mine")["WARMHOLD_CA_BUNDLE"] == "/mine"


# --- up, down


@pytest.fixture
def taken_port() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("by", "name"), [("program", "squatter, PID 42"), ("container", "somebody-else")]
)
def test_a_taken_port_names_its_holder(host: Host, taken_port: int, by: str, name: str) -> None:
    host.engine()
    host.state(publishes=taken_port if by == "container" else None)
    result = host.run("up", WARMHOLD_PORT=str(taken_port))
    result.failed_with(f"port {taken_port} of 127.0.0.1", f"WARMHOLD_PORT={taken_port + 1} make up")
    assert name in result.err
    assert ["compose", "up", "--build", "--wait"] not in host.calls("docker")


def test_our_own_container_may_hold_the_port(host: Host, taken_port: int) -> None:
    host.engine()
    host.state(port=f"127.0.0.1:{taken_port}")
    host.run("up", WARMHOLD_PORT=str(taken_port)).succeeded()


def test_up_shows_the_log_and_ends_with_what_to_paste(host: Host, free_port: int) -> None:
    host.engine()
    result = host.run("up", WARMHOLD_PORT=str(free_port), WARMHOLD_API_KEY="s3cret")
    result.succeeded()
    assert "a line of the engine's log" in result.out
    for phase in ("Docker Engine", "base image", "image build", "engine start"):
        assert f"    {phase} " in result.out
    last = result.out.splitlines()[-1]
    assert last.startswith("curl http://127.0.0.1:8000/v1/completions ")
    assert '"Authorization: Bearer $WARMHOLD_API_KEY"' in last
    body = json.loads(last[last.index("{") : last.rindex("}") + 1])
    assert body == {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}
    assert "s3cret" not in result.out + result.err


def test_without_a_key_the_request_has_no_authorization(host: Host, free_port: int) -> None:
    host.engine()
    result = host.run("up", WARMHOLD_PORT=str(free_port))
    result.succeeded()
    assert "Authorization" not in result.out


@pytest.mark.parametrize(
    ("scenario", "error"),
    [
        ("restarts", "it ended, and Docker started it again"),
        ("unhealthy", "it is running and unhealthy, exit code 0"),
    ],
)
def test_a_container_that_fails_ends_up_with_its_log(
    host: Host, free_port: int, scenario: str, error: str
) -> None:
    host.engine()
    lines = [f"line {n}" for n in range(30)]
    host.state(
        scenario=scenario, log="\n".join(["error: settings: bad", "fix: correct it", *lines])
    )
    result = host.run("up", WARMHOLD_PORT=str(free_port))
    result.failed_with(error, "make down")
    log = result.out.partition("==> the end of the container's log\n")[2]
    assert log.splitlines() == [*lines[-20:], "error: settings: bad", "fix: correct it"]


def test_a_failed_build_is_not_taken_for_a_failed_container(host: Host, free_port: int) -> None:
    host.engine()
    host.state(
        scenario="build fails", container=["c1", "exited", "5", "78", "2020-01-01T00:00:00Z", ""]
    )
    result = host.run("up", WARMHOLD_PORT=str(free_port))
    result.failed_with("docker compose up failed", "make up")
    assert "end of the container's log" not in result.out


@pytest.mark.parametrize(
    ("command", "args"),
    [
        ("down", ["compose", "down"]),
        ("clean-state", ["compose", "down", "--volumes"]),
        ("logs", ["compose", "logs", "--follow", "--tail", "200"]),
    ],
)
def test_commands_for_a_running_service(host: Host, command: str, args: list[str]) -> None:
    host.run(command, YES="1").failed_with("no docker client", "make prepare")
    host.engine()
    host.run(command).succeeded()
    assert host.calls("docker")[-1] == args
    assert not host.calls("apt-get")


# --- tests


def test_run_puts_the_chosen_client_first_on_path(host: Host) -> None:
    host.engine(plugins="")
    fakes.install_docker(host.root / "usr/bin/docker", BOTH)
    host.fake("probe")
    host.run("run", "probe", "compose", "build").succeeded()
    assert host.calls("docker")[-1] == ["compose", "build"]


def test_the_virtual_environment_s_package_is_installed(host: Host) -> None:
    host.run("python", "python3", GOAL="lint").failed_with("python3-venv", "YES=1 make lint")
    host.run("python", "python3", YES="1").succeeded()
    assert host.calls("apt-get")[1][-1] == "python3-venv"
    host.run("python", "python3").succeeded()


def test_timed_targets_end_with_times_and_pytest_s_summary(host: Host) -> None:
    (host.project / "Makefile").write_text(
        "good:\n\t@echo '=== 3 passed in 0.10s ==='\n"
        "bad:\n\t@echo '=== 1 failed, 2 passed in 2.00s (0:00:02) ==='; exit 1\n"
    )
    result = host.run("timed", "good", "good")
    result.succeeded()
    assert result.out.splitlines()[-1] == "=== 3 passed in 0.10s ==="
    result = host.run("timed", "good", "bad", "never")
    result.failed_with("make bad failed", "output above")
    assert "never" not in result.out
    assert [line.split()[0] for line in result.out.splitlines()[-4:-2]] == ["good", "bad"]


def test_an_unknown_command_is_an_error(host: Host) -> None:
    host.run("uo").failed_with("unknown command: uo", "make help")


@pytest.mark.parametrize("code", [0, 2])
def test_the_ci_entry_agrees_to_installs_and_passes_failures_on(host: Host, code: int) -> None:
    (host.project / ".ci").mkdir()
    shutil.copy(REPOSITORY / ".ci/run", host.project / ".ci")
    (host.project / "Makefile").write_text(f'ci:\n\t@test "$$YES" = 1 && exit {code}\n')
    done = subprocess.run([host.project / ".ci/run"], env=host.env, capture_output=True, timeout=60)
    assert done.returncode == code


def test_make_alone_lists_every_target() -> None:
    done = subprocess.run(["make"], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    listed = {line.split()[0] for line in done.stdout.splitlines()}
    phony = next(
        line
        for line in (REPOSITORY / "Makefile").read_text().splitlines()
        if line.startswith(".PHONY:")
    )
    assert listed == set(phony.split()[1:])
