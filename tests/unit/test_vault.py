# SPDX-License-Identifier: Apache-2.0
"""The vault and PID 1's fd store with real sockets and real memfds, in this process."""

import dataclasses
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from stack import ROOT, eventually
from vault_process import (
    SIZE,
    Loop,
    close_all,
    command,
    connect,
    least_fds,
    make_generation,
    open_fds,
    running_vault,
)
from warmhold_entrypoint.container import fdstore
from warmhold_entrypoint.container.fdstore import FdStore
from warmhold_entrypoint.running import tree
from warmhold_wcache import segments
from warmhold_wcache import vault as vault_module
from warmhold_wcache.client import VaultClient
from warmhold_wcache.errors import MissError, WcacheError
from warmhold_wcache.health import make_server
from warmhold_wcache.protocol import FrameReader, decode, encode
from warmhold_wcache.store import FdStoreClient
from warmhold_wcache.verify import check_resident


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = open_fds()
    yield
    assert open_fds() == before


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """An fd store as PID 1 serves it."""
    made = FdStore(tmp_path / "fdstore.sock", os.getuid())
    with Loop(made):
        yield tmp_path / "fdstore.sock"
    made.close()


def publish(client: VaultClient, name: str = "a", count: int = 3) -> str:
    generation, fds = make_generation(name, count)
    client.publish(generation, fds)
    close_all(fds)
    return generation.id


def key(name: str) -> dict[str, str]:
    return {"model": name, "dtype": "float32"}


@pytest.mark.parametrize("count", [1, 3, 248, 249, 250, 251, 499, 500, 501, 700])
def test_what_was_published_is_fetched(tmp_path: Path, store: Path, count: int) -> None:
    with running_vault(tmp_path, store) as (path, _), VaultClient(path) as client:
        generation, fds = make_generation("m", count)
        client.publish(generation, fds)
        back, others = client.fetch(generation.key)
        assert back == generation
        assert [os.fstat(fd).st_ino for fd in others] == [os.fstat(fd).st_ino for fd in fds]
        assert os.pread(others[-1], SIZE, 0) == os.pread(fds[-1], SIZE, 0)
        close_all(fds + others)


def test_a_published_segment_is_sealed(tmp_path: Path) -> None:
    with running_vault(tmp_path) as (path, _), VaultClient(path) as client:
        generation, fds = make_generation()
        client.publish(generation, fds)
        with pytest.raises(PermissionError):
            os.pwrite(fds[0], b"x", 0)
        close_all(fds)


def test_a_generation_on_a_gpu_is_the_drivers_descriptors(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vault never asks what they are. /dev/null stands for the driver's device file."""
    generation, memfds = make_generation(backend="cuda-vmm")
    fds = [os.open("/dev/null", os.O_RDWR) for _ in memfds]
    with running_vault(tmp_path, store) as (path, _), VaultClient(path) as client:
        with pytest.raises(WcacheError, match="not the NVIDIA driver's"):
            client.publish(generation, memfds)
        monkeypatch.setattr(segments, "NVIDIA_MAJOR", 1)
        client.publish(generation, fds)
    with running_vault(tmp_path, store) as (path, _), VaultClient(path) as client:
        back, others = client.fetch(generation.key)  # from the store
        assert (back, len(others)) == (generation, len(fds))
        assert all(os.fstat(fd).st_rdev == os.fstat(fds[0]).st_rdev for fd in others)
        code, text = command(path, "verify", "--resident-only")
        assert (code, "wcache.unsupported: GPU memory cannot be read here: " in text) == (1, True)
    close_all([*fds, *memfds, *others])


def test_several_models_lie_side_by_side_with_bytes_and_last_use(tmp_path: Path) -> None:
    with running_vault(tmp_path) as (path, _), VaultClient(path) as client:
        ids = {publish(client, name, count): (name, count) for name, count in [("a", 1), ("b", 5)]}
        rows = {row["id"]: row for row in client.stat()}
        assert set(rows) == set(ids)
        for generation_id, (name, count) in ids.items():
            row = rows[generation_id]
            assert (row["bytes"], row["segments"]) == (count * SIZE, count)
            assert (row["key"], row["launch_key"]) == (key(name), {"argv": name})
            assert row["holders"] == [os.getpid()]
        used = rows[next(iter(ids))]["last_use"]
        _, fds = client.fetch(key("a"))
        close_all(fds)
        assert next(row for row in client.stat() if row["model"] == "model a")["last_use"] > used


def test_a_miss_names_what_differs_from_the_nearest(tmp_path: Path) -> None:
    with running_vault(tmp_path) as (path, _), VaultClient(path) as client:
        with pytest.raises(MissError) as caught:
            client.fetch(key("a"))
        assert (caught.value.code, caught.value.fields) == ("wcache.absent", {})
        publish(client, "a")
        publish(client, "b")
        with pytest.raises(MissError) as caught:
            client.fetch({"model": "b", "dtype": "int8"})
        assert caught.value.code == "wcache.key-mismatch"
        assert caught.value.fields == {"dtype": ("float32", "int8")}
        assert client.hello()["generations"] == 2


def test_the_same_key_again_takes_the_place_of_the_first(tmp_path: Path, store: Path) -> None:
    with running_vault(tmp_path, store) as (path, _), VaultClient(path) as client:
        publish(client)
        publish(client)
        before = least_fds()
        for _ in range(5):
            publish(client)
        eventually(lambda: open_fds() == before, "the end of the superseded")
        assert len(client.stat()) == 1


def test_drop_refuses_while_a_process_holds_unless_forced(tmp_path: Path, store: Path) -> None:
    with running_vault(tmp_path, store) as (path, _), VaultClient(path) as client:
        generation_id = publish(client)
        with pytest.raises(WcacheError, match=f"held by PID {os.getpid()}") as caught:
            client.drop(generation_id)
        assert caught.value.code == "wcache.in-use"
        client.release(generation_id)
        client.release(generation_id)
        client.lease(generation_id)
        with pytest.raises(WcacheError, match=r"wcache\.in-use"):
            client.drop(generation_id)
        client.drop(generation_id, force=True)
        assert client.stat() == []
        assert client.hello()["leases"] == 0
        assert FdStoreClient(store).entries() == []
        for call in (client.lease, client.drop):
            with pytest.raises(WcacheError, match=r"wcache\.absent"):
                call(generation_id)


HOLDER = """
import sys, time
from pathlib import Path
from warmhold_wcache.client import VaultClient
with VaultClient(Path(sys.argv[1])) as client:
    client.lease(sys.argv[2])
print("held", flush=True)
time.sleep(3600)
"""


def test_a_lease_outlives_connection_and_vault_and_ends_with_its_process(
    tmp_path: Path, store: Path
) -> None:
    environment = {"PYTHONPATH": str(ROOT / "wcache"), "PATH": os.environ["PATH"]}
    with running_vault(tmp_path, store) as (path, _), VaultClient(path) as client:
        generation_id = publish(client)
        client.release(generation_id)
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(path), generation_id],
            env=environment,
            stdout=subprocess.PIPE,
        )
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert client.stat()[0]["holders"] == [holder.pid]
    with running_vault(tmp_path, store) as (path, _), VaultClient(path) as client:
        assert client.stat()[0]["holders"] == [holder.pid]
        with pytest.raises(WcacheError, match=r"wcache\.in-use"):
            client.drop(generation_id)
        holder.send_signal(signal.SIGKILL)
        holder.wait(20)
        holder.stdout.close()
        eventually(lambda: client.stat()[0]["holders"] == [], "the lease's end")
        eventually(lambda: client.hello()["leases"] == 0, "the pidfd's end")
        names = [entry.name for entry in FdStoreClient(store).entries()]
        assert names == [f"generation.{generation_id}"]
        client.drop(generation_id)


def test_a_new_vault_takes_everything_back(tmp_path: Path, store: Path) -> None:
    rows = []
    for _ in range(3):
        with running_vault(tmp_path, store) as (path, _), VaultClient(path) as client:
            if not rows:
                for name in ("a", "b"):
                    publish(client, name, 300)
                rows = client.stat()
            assert [row["id"] for row in client.stat()] == [row["id"] for row in rows]
            assert [row["holders"] for row in client.stat()] == [[os.getpid()]] * 2
            _, fds = client.fetch(key("b"))
            assert os.pread(fds[299], 4, 0) == b"b299"
            close_all(fds)


def test_a_publish_is_refused_when_the_store_does_not_keep_it(tmp_path: Path) -> None:
    listener = fdstore.listen(tmp_path / "hung.sock")
    with running_vault(tmp_path) as (path, vault):
        vault._store = FdStoreClient(tmp_path / "hung.sock", timeout_s=0.2)
        with VaultClient(path) as client:
            generation, fds = make_generation()
            with pytest.raises(WcacheError, match=r"wcache\.hung"):
                client.publish(generation, fds)
            assert client.stat() == []
            close_all(fds)
    listener.close()


def test_what_the_store_cannot_vouch_for_is_dropped(tmp_path: Path, store: Path) -> None:
    foreign = FdStoreClient(store)
    with open("/dev/null", "rb") as file:  # noqa: PTH123
        for name in ("generation.0", "lease.0.1", "other.x"):
            foreign.put(name, [file.fileno()])
    with running_vault(tmp_path, store) as (path, _), VaultClient(path) as client:
        assert client.stat() == []
    assert foreign.entries() == []


def test_a_client_survives_the_vaults_restart(tmp_path: Path, store: Path) -> None:
    client = VaultClient(tmp_path / "vault.sock")
    for number in range(3):
        with running_vault(tmp_path, store):
            publish(client, str(number))
            assert len(client.stat()) == number + 1
    client.close()


def test_why_nobody_answers_has_a_code_each(tmp_path: Path) -> None:
    def code(path: Path) -> str:
        with VaultClient(path, timeout_s=0.2) as client, pytest.raises(WcacheError) as caught:
            client.hello()
        return caught.value.code

    assert code(tmp_path / "absent.sock") == "wcache.absent"
    listener = fdstore.listen(tmp_path / "left.sock")
    assert code(tmp_path / "left.sock") == "wcache.hung"
    listener.close()
    assert code(tmp_path / "left.sock") == "wcache.dead-socket"


def test_a_full_queue_is_hung_too(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "full.sock"))
    listener.listen(0)
    first = connect(tmp_path / "full.sock")
    with (
        VaultClient(tmp_path / "full.sock", timeout_s=0.2) as client,
        pytest.raises(WcacheError, match=r"wcache\.hung"),
    ):
        client.hello()
    first.close()
    listener.close()


def test_verify_finds_a_flipped_bit(tmp_path: Path) -> None:
    import mmap

    with running_vault(tmp_path) as (path, _), VaultClient(path) as client:
        generation, fds = make_generation()
        mapping = mmap.mmap(fds[1], SIZE)
        client.publish(generation, fds)
        (row,) = client.stat()
        assert check_resident(client, row).sound
        mapping[1000] ^= 4
        report = check_resident(client, row)
        assert not report.sound
        assert (report.changed, report.tensors) == ((1,), ("w1",))
        assert "CHANGED" in report.line()
        mapping.close()
        close_all(fds)


def test_generations_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vault_module, "MAX_GENERATIONS", 2)
    with running_vault(tmp_path) as (path, _), VaultClient(path) as client:
        publish(client, "a")
        publish(client, "b")
        with pytest.raises(WcacheError, match=r"wcache\.too-large"):
            publish_and_close(client, "c")
        publish(client, "b")
        assert len(client.stat()) == 2


def publish_and_close(client: VaultClient, name: str) -> None:
    generation, fds = make_generation(name)
    try:
        client.publish(generation, fds)
    finally:
        close_all(fds)


def test_health_over_http_follows_the_vault(tmp_path: Path) -> None:
    server = make_server(0, tmp_path / "vault.sock", 0.5)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def ask(path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    assert server.server_address[0] == "127.0.0.1"
    status, text = ask("/health")
    assert (status, text.partition(":")[0]) == (503, "wcache.absent")
    with running_vault(tmp_path):
        assert ask("/health")[0] == 200
        assert ask("/")[0] == 404
    status, text = ask("/health")
    assert (status, text.partition(":")[0]) == (503, "wcache.dead-socket")
    server.shutdown()
    thread.join()
    server.server_close()


# The commands


def test_commands_tell_by_their_exit_code(tmp_path: Path) -> None:
    with running_vault(tmp_path) as (path, _), VaultClient(path) as client:
        assert command(path, "status") == (
            0,
            "ID  MODEL  BYTES  SEGMENTS  LAST USE  HELD BY\n",
        )
        generation_id = publish(client)
        code, text = command(path, "status")
        assert (code, text.splitlines()[1].split()[:3]) == (0, [generation_id, "model", "a"])
        (row,) = json.loads(command(path, "status", "--json")[1])
        assert row == client.stat()[0]
        assert command(path, "verify")[0] == 0
        assert command(path, "verify", "nothing")[0] == 1
        # verify ran in this process, so the lease that it ended was ours too.
        client.lease(generation_id)
        code, text = command(path, "drop", generation_id)
        assert (code, text.split(": ")[1]) == (1, "wcache.in-use")
        assert "fix: " in text
        assert command(path, "health") == (0, f"alive: pid {os.getpid()}, 1 generation(s)\n")
        assert command(path, "drop", generation_id, "--force")[0] == 0
        assert client.stat() == []
        assert command(path, "nonsense")[0] == 2
        assert command(path, "--help")[0] == 0
    assert command(path, "health")[0] == 69
    assert command(tmp_path / "none", "status")[0] == 69


def test_verify_does_not_call_sound_what_has_no_checksum(tmp_path: Path) -> None:
    with running_vault(tmp_path) as (path, _), VaultClient(path) as client:
        generation, fds = make_generation()
        bare = tuple(dataclasses.replace(segment, checksum="") for segment in generation.segments)
        client.publish(dataclasses.replace(generation, segments=bare), fds)
        close_all(fds)
        code, text = command(path, "verify")
        assert (code, "3 segment(s) without a checksum" in text) == (1, True)
        (report,) = json.loads(command(path, "verify", "--json")[1])
        assert (report["sound"], report["checked"]) == (False, 0)


# The store by itself


def test_the_store_keeps_a_share_of_the_limit_for_pid_1(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fdstore, "_OWN_FDS", 20_000 - 10)
    monkeypatch.setattr(fdstore.resource, "getrlimit", lambda _: (20_000, 20_000))
    client = FdStoreClient(store)
    with open("/dev/null", "rb") as file:  # noqa: PTH123
        client.put("x.a", [file.fileno()] * 6)
        with pytest.raises(WcacheError, match=r"wcache\.too-large"):
            client.put("x.b", [file.fileno()] * 5)
        client.put("x.b", [file.fileno()] * 4)
        client.drop("x.a")
        client.put("x.c", [file.fileno()] * 6)
    assert [(entry.name, entry.total) for entry in client.entries()] == [("x.b", 4), ("x.c", 6)]


@pytest.mark.parametrize("name", ["", "x", ".x", "x.", "x./../y", "X.a", "x." + "a" * 101, "x.ü"])
def test_the_store_takes_plain_names_only(store: Path, name: str) -> None:
    with open("/dev/null", "rb") as file, pytest.raises(WcacheError) as caught:  # noqa: PTH123
        FdStoreClient(store).put(name, [file.fileno()])
    assert caught.value.code == "wcache.malformed"


REFUSED = """
import os, socket, sys
os.setgroups([int(word) for word in sys.argv[3].split()])
os.setuid(int(sys.argv[2]))
with socket.socket(socket.AF_UNIX) as sock:
    sock.settimeout(20)
    try:
        sock.connect(sys.argv[1])
        sock.sendall(bytes.fromhex(sys.argv[4]))
    except PermissionError:
        print("EACCES", end="")
        sys.exit()
    except BrokenPipeError:
        pass
    answer = b""
    while chunk := sock.recv(65536):
        answer += chunk
        if len(answer) >= 4 and len(answer) == 4 + int.from_bytes(answer[:4], "big"):
            break
    sys.stdout.buffer.write(answer)
"""


def asked_by(path: Path, uid: int, groups: str, body: dict[str, object]) -> bytes:
    """What a process of that uid and those groups gets for a request."""
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            REFUSED,
            str(path),
            str(uid),
            groups,
            encode(body).hex(),
        ],
        capture_output=True,
        timeout=30,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize("verb", ["hello", "stat", "fetch", "drop", "list", "take"])
def test_another_user_gets_nothing(tmp_path: Path, store: Path, verb: str) -> None:
    assert os.getuid() == 0, "changing the user needs root"
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.stat().st_mode & 0o001 == 0:
            folder.chmod(folder.stat().st_mode | 0o011)
    with running_vault(tmp_path, store) as (path, _), VaultClient(path) as client:
        generation_id = publish(client)
        request = {"verb": verb, "id": generation_id, "key": key("a"), "force": True}
        request["name"] = f"generation.{generation_id}"
        for socket_path in (path, store):
            assert asked_by(socket_path, 65534, "", request) == b"EACCES"
            socket_path.chmod(0o666)  # even if the file let it through
            answer = decode(asked_by(socket_path, 65534, "", request)[4:])
            assert (answer["ok"], answer["code"]) == (False, "wcache.other-uid")
        # The store does not serve an engine either, whose user is the vault's.
        answer = decode(asked_by(store, 0, str(tree.ENGINE_GROUP), {"verb": "list"})[4:])
        assert answer["code"] == "wcache.other-uid"
        answer = decode(asked_by(store, 0, "7 8", {"verb": "list"})[4:])
        assert answer["ok"] is True
        assert len(client.stat()) == 1


def test_a_dropped_generation_stays_whole_for_a_transfer_under_way(
    tmp_path: Path,
) -> None:
    """Descriptors lent to a transfer stay open until it ends, whatever is dropped meanwhile."""
    with running_vault(tmp_path) as (path, _), VaultClient(path) as client:
        generation_id = publish(client, "a", 300)
        slow = connect(path)
        reader = FrameReader(1 << 20)

        def ask(body: dict[str, object], want: int) -> list[int]:
            slow.sendall(encode(body))
            while (frame := reader.read(slow, want)) is None:
                pass
            assert frame.body["ok"] is True
            return frame.fds.take()

        ask({"verb": "fetch", "key": key("a")}, 0)
        first = ask({"verb": "next"}, 250)
        client.drop(generation_id, force=True)
        publish(client, "b", 300)
        rest = ask({"verb": "next"}, 51)
        assert os.pread(rest[-1], 4, 0) == b"a299"
        ask({"verb": "next"}, 0)
        close_all(first + rest)
        slow.close()
