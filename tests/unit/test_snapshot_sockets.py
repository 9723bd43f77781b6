# SPDX-License-Identifier: Apache-2.0
"""Sockets as the kernel tells them: canned tables, and this process's own pair."""

import os
import socket
import struct
from ipaddress import ip_address

from warmhold_snapshot import sockets

TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 11 1 0
   1: 0100007F:1F40 0100007F:C350 01 00000000:00000000 00:00000000 00000000     0        0 12 1 0
   2: 020011AC:1F40 030011AC:C351 06 00000000:00000000 00:00000000 00000000     0        0 0 1 0
"""
TCP6 = """\
  sl  local_address                         remote_address                        st x y z u t inode
   0: 0000000000000000FFFF00000100007F:1F40 0000000000000000FFFF00000100007F:C350 01 0:0 0 0 0 0 13
   1: 00000000000000000000000000000000:1F41 00000000000000000000000000000000:0000 0A 0:0 0 0 0 0 14
"""


def test_tcp() -> None:
    found = sockets.parse_inet(TCP, "tcp")
    assert set(found) == {11, 12}, "inode 0 belongs to nobody"
    assert found[11].state == sockets.LISTEN and found[11].local == (ip_address("0.0.0.0"), 8000)
    assert found[12].remote == (ip_address("127.0.0.1"), 50000)


def test_tcp6_with_an_ipv4_address_in_it() -> None:
    found = sockets.parse_inet(TCP6, "tcp")
    assert found[13].local == (ip_address("127.0.0.1"), 8000)
    assert found[14].local == (ip_address("::"), 8001)


def test_unix_answer() -> None:
    name = b"\0hidden"
    attributes = struct.pack("=HHI", 8, 2, 99)
    attributes += struct.pack("=HH", 4 + len(name), 0) + name + b"\0" * (-len(name) % 4)
    attributes += struct.pack("=HHII", 12, 3, 7, 8)
    body = struct.pack("=BBBBIII", socket.AF_UNIX, 1, 1, 0, 55, 0, 0) + attributes
    assert sockets.parse_unix(body) == sockets.UnixSocket(55, 99, "@hidden", 2)


def test_the_kernel_tells_peers() -> None:
    one, other = socket.socketpair()
    with one, other:
        found = sockets.read_sockets(os.getpid())
        inodes = [os.fstat(end.fileno()).st_ino for end in (one, other)]
        assert found.unix[inodes[0]].peer == inodes[1]
        assert found.unix[inodes[1]].peer == inodes[0]


def test_the_kernel_tells_who_waits(tmp_path: object) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(f"\0warmhold-test-{os.getpid()}")
        listener.listen()
        client.connect(listener.getsockname())
        found = sockets.read_unix()[os.fstat(listener.fileno()).st_ino]
        assert found.name == f"@warmhold-test-{os.getpid()}" and found.pending == 1
