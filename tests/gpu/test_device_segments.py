# SPDX-License-Identifier: Apache-2.0
"""Segments on a real GPU and in the real vault: kept by descriptors, counted once."""

import os
import stat
from pathlib import Path

import pytest
from gpu_stand import SLACK_BYTES, Child, Vault, near, say, used_bytes, wait_for_used
from warmhold_wcache import segments
from warmhold_wcache.client import VaultClient
from warmhold_wcache.errors import WcacheError
from warmhold_wcache.generation import Generation, Segment
from warmhold_wcache.verify import check_resident

COUNT, SIZE = 8, 512 << 20
TOTAL = COUNT * SIZE


def published(vault: Vault, count: int = COUNT, size: int = SIZE) -> Child:
    child = Child("segments_child.py", "publish", str(vault.socket), str(count), str(size))
    say(f"published {child.hear()}")
    return child


def test_what_a_descriptor_is(vault: Vault) -> None:
    with Child("segments_child.py", "show", str(vault.socket)) as child:
        seen = child.hear()
    for name, value in seen.items():
        say(f"{name} = {value!r}")
    assert stat.S_ISCHR(int(seen["mode"], 8))
    assert seen["rdev"][0] == segments.NVIDIA_MAJOR
    assert not seen["inheritable"]
    assert seen["view"] == "cuda:0"


def test_weights_outlive_their_processes(vault: Vault, base: int) -> None:
    publisher = published(vault)
    alone = used_bytes()
    with publisher, Child("segments_child.py", "remap", str(vault.socket)) as one:
        say(f"first mapping {one.hear()}")
        context = used_bytes() - alone
        with Child("segments_child.py", "remap", str(vault.socket)) as two:
            say(f"second mapping {two.hear()}")
            both = used_bytes() - alone
            say(f"base {base >> 20} MiB, publisher {alone - base >> 20} MiB more,")
            say(f"a mapping process {context >> 20} MiB, two {both >> 20} MiB")
            assert both < TOTAL, "the weights are counted again"
            maps = Path(f"/proc/{vault.process.pid}/maps").read_text()
            assert "cuda" not in maps and "nvidia" not in maps
            status = Path(f"/proc/{vault.process.pid}/status").read_text()
            say(f"vault {status.split('VmRSS:')[1].splitlines()[0].strip()}")
            for child in (publisher, one, two):
                child.kill()
    kept = wait_for_used(near(base + TOTAL))
    say(f"no CUDA process is left: {kept - base >> 20} MiB more than before")
    assert near(base + TOTAL)(kept)
    with VaultClient(vault.socket) as client:
        (row,) = client.stat()
        report = check_resident(client, row)
        say(report.line())
        assert report.sound and report.checked == COUNT
        client.drop(row["id"], force=True)
    left = wait_for_used(near(base))
    say(f"dropped: {left - base >> 20} MiB more than before")
    assert left <= base + SLACK_BYTES


def test_a_segment_comes_back_at_its_address(vault: Vault, base: int) -> None:
    with published(vault), Child("segments_child.py", "remap", str(vault.socket)) as child:
        first = child.hear()
        say(f"unmapped {child.go_on()}")
        again = child.go_on()
        say(f"mapped again {again}")
    assert first["sound"] and first["equal"]
    assert again["sound"] and again["equal"] and again["same_addresses"]
    assert max(first["map_s"], again["map_s"]) < 0.05, "the target is 50 ms"


def test_writing_into_a_shared_segment(vault: Vault, base: int) -> None:
    with published(vault, 1), Child("segments_child.py", "write", str(vault.socket)) as child:
        refused = child.hear()["refused"]
        say(f"refused: {refused!r}")
        with VaultClient(vault.socket) as client:
            (row,) = client.stat()
            report = check_resident(client, row)
    say(report.line())
    assert report.sound == bool(refused)
    assert refused, "the driver lets a reader write"


def test_a_private_copy_leaves_the_published_one(vault: Vault, base: int) -> None:
    with published(vault, 2), Child("segments_child.py", "detach", str(vault.socket)) as child:
        seen = child.hear()
    say(str(seen))
    assert seen["copied"] and seen["written"] and seen["sound"]


def test_what_is_no_segment(vault: Vault, base: int) -> None:
    with Child("segments_child.py", "misfit", str(vault.socket)) as child:
        texts = child.hear()
    say(str(texts))
    assert all(texts)


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/nvidiactl"])
def test_the_vault_takes_the_drivers_descriptors_alone(vault: Vault, name: str) -> None:
    made = (Segment(4096, 0, ""), Segment(4096, 0, ""))
    generation = Generation({"model": "x"}, {}, "cuda-vmm", "cuda:x", "x", made, (), {}, {})
    memfds = [segments.create_sealed(b"x" * 4096, "test") for _ in made]
    fds = [os.open(name, os.O_RDWR) for _ in made]
    with VaultClient(vault.socket) as client:
        for given in (memfds, fds):
            try:
                client.publish(generation, given)
                taken = True
            except WcacheError as error:
                taken = False
                say(error.detail)
            assert taken == (given is fds and name == "/dev/nvidiactl")
    vault.drop_all()
    for fd in [*memfds, *fds]:
        os.close(fd)
