# SPDX-License-Identifier: Apache-2.0
"""The rules: what a dump cannot take along, or a restore elsewhere could not give back.

What CRIU alone can tell (a socket of a rare family, say) it tells in its log.
"""

import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from . import cuda, fds
from .fds import Descriptor, FileStatus
from .sockets import CLOSED, LISTEN, Endpoint, InetSocket, Sockets

# Deleted files that are still open travel in the image up to this size.
GHOST_LIMIT_BYTES = 256 << 20
# Weights come from the vault at a restore; what is still mapped would travel in the image instead.
WEIGHT_MEMFDS = ("weights", "warmhold")
SOCKET = re.compile(r"socket:\[(\d+)\]")
_ANONYMOUS = re.compile(r"anon_inode:\[?([\w:-]+)\]?")
MAPPED, PROCESS = -1, -2  # in place of a descriptor's number
_ANONYMOUS_KINDS = {
    "io_uring": "io_uring",
    "inotify": "inotify",
    "fanotify": "fanotify",
    "userfaultfd": "userfaultfd",
    "perf_event": "perf_event",
    "bpf-prog": "bpf",
    "bpf-link": "bpf",
    "seccomp": "seccomp-notify",
}
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


@dataclass(frozen=True)
class Offender:
    """One thing in the way; `fd` is `MAPPED` or `PROCESS` for what is none."""

    pid: int
    fd: int
    kind: str
    detail: str

    def line(self) -> str:
        """Return it as one line."""
        where = {MAPPED: " mapped", PROCESS: ""}.get(self.fd, f" fd {self.fd}")
        return f"pid {self.pid}{where}: {self.kind}: {self.detail}"


@dataclass(frozen=True)
class Rules:
    """The rules, with what they need to know of the whole tree. With `on_gpu` criu's plug-in takes
    along what CUDA itself has open."""

    members: set[int]
    inodes: set[int]
    sockets: Sockets
    outside_pipes: Mapping[int, int]
    stdio: tuple[int, ...]
    ghost_limit_bytes: int
    on_gpu: bool = False

    def inet(self, state: int | None = None) -> Iterator[InetSocket]:
        """The tree's own TCP and UDP sockets."""
        for inode in self.inodes & self.sockets.inet.keys():
            if state in (None, self.sockets.inet[inode].state):
                yield self.sockets.inet[inode]

    def descriptor(self, item: Descriptor) -> Iterator[tuple[str, str]]:
        """Given a descriptor, yield kind and detail of what is wrong with it."""
        pipe = fds.pipe_inode(item.link)
        socket = SOCKET.fullmatch(item.link)
        anonymous = _ANONYMOUS.fullmatch(item.link)
        if pipe is not None:
            if pipe in self.outside_pipes and pipe not in self.stdio:
                yield "pipe-peer", f"{item.link} is also held by pid {self.outside_pipes[pipe]}"
        elif socket:
            yield from self._socket(int(socket[1]))
        elif anonymous:
            yield from self._anonymous(anonymous[1], item.info)
        elif item.link.startswith("/dmabuf:"):
            yield "dmabuf", item.link
        else:
            yield from self.path(item.link, item.status)

    def path(
        self, link: str, status: FileStatus | None, mapped: bool = False
    ) -> Iterator[tuple[str, str]]:
        """Given a link that is a path and its file, yield kind and detail of what is wrong."""
        if link.startswith("/memfd:"):
            if link.removeprefix("/memfd:").startswith(WEIGHT_MEMFDS):
                yield "memfd", f"{link.removesuffix(fds.DELETED)} should have been given back"
        elif link.startswith("/SYSV"):
            yield "sysv-shm", f"{link}: System V shared memory needs an IPC namespace of its own"
        elif link.startswith("anon_inode:"):
            anonymous = _ANONYMOUS.fullmatch(link)
            if anonymous and not mapped:
                yield from self._anonymous(anonymous[1], "")
        elif link.endswith(fds.DELETED) and not link.startswith(("/dev/zero", "/anon_hugepage")):
            yield from self._deleted(link, status)
        elif status is not None and stat.S_ISCHR(status.mode):
            if link.startswith(("/dev/pts/", "/dev/tty", "/dev/console")):
                yield "terminal", link
            elif cuda.is_device(link):
                if not self.on_gpu:
                    yield "cuda", f"{link}: a GPU is in use, and criu was given no plug-in for it"
            elif link not in _DEVICES:
                yield "device", link
        elif status is not None and stat.S_ISREG(status.mode) and not _is_utf8(link):
            yield "file-name", f"{link!a} is no UTF-8, which a manifest has to be"

    def _deleted(self, link: str, status: FileStatus | None) -> Iterator[tuple[str, str]]:
        if status is None or not stat.S_ISREG(status.mode):
            return
        if status.links == 0:
            if status.size_bytes > self.ghost_limit_bytes:
                limit = self.ghost_limit_bytes
                yield "deleted-file", f"{link} has {status.size_bytes} bytes, over {limit}"
        elif not link.startswith(fds.SHM):
            # CRIU would leave a second name beside it, which a new container does not have.
            yield "deleted-file", f"{link} still has another name outside /dev/shm"

    def _anonymous(self, name: str, info: str) -> Iterator[tuple[str, str]]:
        if name in _ANONYMOUS_KINDS:
            yield _ANONYMOUS_KINDS[name], f"anon_inode:{name}"
        elif name == "pidfd":
            match = re.search(r"^Pid:\s*(\d+)", info, re.MULTILINE)
            if match and int(match[1]) not in self.members:
                yield "pidfd", f"of process {match[1]} outside the tree"
        elif name.startswith("kvm"):
            yield "kvm", name

    def _socket(self, inode: int) -> Iterator[tuple[str, str]]:
        if inode in self.sockets.unix:
            unix = self.sockets.unix[inode]
            if unix.peer and unix.peer not in self.inodes:
                name = unix.name or self._name_of(unix.peer) or "unnamed"
                yield "unix-peer", f"{name}: its peer is outside the tree"
            if unix.pending:
                yield "unix-pending", f"{unix.name}: {unix.pending} connection(s) not accepted"
        elif inode in self.sockets.inet:
            yield from self._inet(self.sockets.inet[inode])

    def _inet(self, inet: InetSocket) -> Iterator[tuple[str, str]]:
        ours = show(inet.local)
        if inet.protocol == "tcp" and inet.state not in (LISTEN, CLOSED):
            pair = (inet.remote, inet.local)
            if pair not in {(other.local, other.remote) for other in self.inet()}:
                yield "tcp-peer", f"{ours} is connected to {show(inet.remote)} outside the tree"
            return
        if inet.protocol == "udp" and inet.remote[1] and not inet.remote[0].is_loopback:
            yield "udp-peer", f"{ours} is connected to {show(inet.remote)}"
        address = inet.local[0]
        if not (address.is_loopback or address.is_unspecified):
            what = "listens on" if inet.state == LISTEN else "is bound to"
            yield "own-address", f"{what} {ours}, which another container does not have"

    def _name_of(self, inode: int) -> str:
        peer = self.sockets.unix.get(inode)
        return peer.name if peer else ""


def _is_utf8(link: str) -> bool:
    """Whether a name is: a descriptor's link has surrogates in place of other bytes, a mapping's
    the replacement character."""
    return "\ufffd" not in link and not any("\ud800" <= char <= "\udfff" for char in link)


def show(endpoint: Endpoint) -> str:
    """Given an endpoint, return it as people write it."""
    address, port = endpoint
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
