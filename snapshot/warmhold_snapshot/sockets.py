# SPDX-License-Identifier: Apache-2.0
"""Which sockets exist, and who is at their other end: by inode, as /proc names them.

TCP and UDP come from /proc/PID/net; peers of unix sockets only from the kernel's socket diagnosis.
Sources: proc(5), linux/unix_diag.h, linux/netlink.h, net/tcp_states.h.
"""

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .errors import SnapshotError

ESTABLISHED, CLOSED, LISTEN = 0x01, 0x07, 0x0A
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_REQUEST_DUMP = 0x001 | 0x300
_DONE, _ERROR = 3, 2
_SHOW_NAME, _SHOW_PEER, _SHOW_PENDING = 0x1, 0x4, 0x8
_NAME, _PEER, _PENDING = 0, 2, 3
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBHIIIII")
_MESSAGE = struct.Struct("=BBBBIII")
_ATTRIBUTE = struct.Struct("=HH")
_TIMEOUT_S = 5.0

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Endpoint = tuple[Address, int]


@dataclass(frozen=True)
class InetSocket:
    """A TCP or UDP socket; the state is a number of net/tcp_states.h."""

    inode: int
    protocol: str
    local: Endpoint
    remote: Endpoint
    state: int


@dataclass(frozen=True)
class UnixSocket:
    """A unix socket; `peer` is 0 where it has none, `pending` counts what nobody accepted yet."""

    inode: int
    peer: int
    name: str
    pending: int


@dataclass(frozen=True)
class Sockets:
    """All sockets of a network namespace, by inode."""

    inet: Mapping[int, InetSocket] = field(default_factory=dict)
    unix: Mapping[int, UnixSocket] = field(default_factory=dict)


def read_sockets(pid: int, proc: Path = Path("/proc")) -> Sockets:
    """Given a process of the namespace that the caller is in too, return its sockets.

    Raise SnapshotError `snapshot.sockets` where the kernel does not tell peers.
    """
    inet: dict[int, InetSocket] = {}
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        try:
            text = (proc / str(pid) / "net" / protocol).read_text()
        except OSError:  # no IPv6 here
            continue
        inet |= parse_inet(text, protocol[:3])
    return Sockets(inet, read_unix())


def parse_inet(text: str, protocol: str) -> dict[int, InetSocket]:
    """Given a table as /proc/net/tcp has it, return its sockets that belong to somebody."""
    found = {}
    for line in text.splitlines()[1:]:
        words = line.split()
        inode = int(words[9])
        if inode:
            local, remote = parse_endpoint(words[1]), parse_endpoint(words[2])
            found[inode] = InetSocket(inode, protocol, local, remote, int(words[3], 16))
    return found


def parse_endpoint(text: str) -> Endpoint:
    """Given `0100007F:1F40`, return 127.0.0.1 and 8000; an IPv4 address within IPv6 is IPv4."""
    digits, _, port = text.partition(":")
    # 32-bit words in this machine's byte order.
    words = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    address = ipaddress.ip_address(packed)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return address, int(port, 16)


def read_unix() -> dict[int, UnixSocket]:
    """Return every unix socket of this network namespace with its peer."""
    states = 0xFFFFFFFF
    show = _SHOW_NAME | _SHOW_PEER | _SHOW_PENDING
    body = _REQUEST.pack(socket.AF_UNIX, 0, 0, states, 0, show, 0, 0)
    header = _HEADER.pack(
        _HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, os.getpid()
    )
    found = {}
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
            netlink.settimeout(_TIMEOUT_S)
            netlink.sendto(header + body, (0, 0))
            done = False
            while not done:
                for kind, payload in _split(netlink.recv(1 << 17)):
                    if kind == _ERROR:
                        code = -struct.unpack_from("=i", payload)[0]
                        raise OSError(code, os.strerror(code))
                    if kind == _DONE:
                        done = True
                    else:
                        unix = parse_unix(payload)
                        found[unix.inode] = unix
    except OSError as error:
        detail = f"the kernel does not tell the peers of unix sockets: {error}"
        remedy = "use a kernel with CONFIG_UNIX_DIAG, which CRIU needs too"
        raise SnapshotError("snapshot.sockets", detail, remedy) from error
    return found


def parse_unix(payload: bytes) -> UnixSocket:
    """Given the body of one answer, return the socket in it."""
    inode = _MESSAGE.unpack_from(payload)[4]
    peer, name, pending = 0, "", 0
    position = _MESSAGE.size
    while position + _ATTRIBUTE.size <= len(payload):
        size, kind = _ATTRIBUTE.unpack_from(payload, position)
        if size < _ATTRIBUTE.size:
            break
        value = payload[position + _ATTRIBUTE.size : position + size]
        if kind == _PEER:
            (peer,) = struct.unpack("=I", value)
        elif kind == _PENDING:
            pending = len(value) // 4
        elif kind == _NAME:
            text = value.decode(errors="replace")
            name = f"@{text[1:]}" if text.startswith("\0") else text.rstrip("\0")
        position += (size + 3) & ~3
    return UnixSocket(inode, peer, name, pending)


def _split(data: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position + _HEADER.size <= len(data):
        size, kind, *_ = _HEADER.unpack_from(data, position)
        yield kind, data[position + _HEADER.size : position + size]
        position += (size + 3) & ~3
